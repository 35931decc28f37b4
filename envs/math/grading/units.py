r"""Words around a value: units, which it may be written with, and words that change what it says.

``5 \text{ cm}`` is 5 with a unit and ``5 \text{ million}`` another number; ``5 \text{ at most}``
is no value at all. What is not known to be harmless is taken for a change.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

_NAMES = {
    "%": ("percent",),
    "degree": ("degree", "deg"),
    "radian": ("radian", "rad"),
    "$": ("dollar", "usd", "buck"),
    "cent": ("cent",),
    "in": ("inch", "inche", "in"),
    "ft": ("foot", "feet", "ft"),
    "yd": ("yard", "yd"),
    "mi": ("mile", "mi"),
    "mi/h": ("mph",),
    "m": ("meter", "metre"),
    "cm": ("centimeter", "centimetre", "cm"),
    "mm": ("millimeter", "millimetre", "mm"),
    "km": ("kilometer", "kilometre", "km"),
    "nm": ("nanometer", "nanometre", "nm"),
    "um": ("micrometer", "micron", "μm", "µm", "um"),
    "pc": ("parsec", "pc"),
    "s": ("second", "sec"),
    "ms": ("millisecond", "ms"),
    "min": ("minute", "min"),
    "h": ("hour", "hr"),
    "day": ("day",),
    "week": ("week",),
    "month": ("month",),
    "year": ("year", "yr", "yrs"),
    "g": ("gram", "gm"),
    "kg": ("kilogram", "kg"),
    "mg": ("milligram", "mg"),
    "lb": ("pound", "lb"),
    "oz": ("ounce", "oz"),
    "l": ("liter", "litre"),
    "ml": ("milliliter", "millilitre", "ml"),
    "gal": ("gallon", "gal"),
    "n": ("newton",),
    "j": ("joule",),
    "kj": ("kilojoule", "kj"),
    "cal": ("calorie", "cal"),
    "ev": ("electronvolt", "ev"),
    "erg": ("erg",),
    "w": ("watt",),
    "kw": ("kilowatt", "kw"),
    "v": ("volt",),
    "a": ("ampere", "amp"),
    "hz": ("hertz", "hz"),
    "pa": ("pascal", "pa"),
    "atm": ("atmosphere", "atm"),
    "k": ("kelvin",),
    "c": ("celsius",),
    "f": ("fahrenheit",),
    "mol": ("mole", "mol"),
    "å": ("angstrom", "å"),
    "ohm": ("ohm", "ω"),
    "au": ("au",),
    "ly": ("lightyear", "ly"),
    "arcsec": ("arcsecond", "arcsec"),
    "kwh": ("kwh",),
    "rpm": ("rpm",),
    "cup": ("cup",),
    "unit": ("unit",),
}
_UNITS = {name: unit for unit, names in _NAMES.items() for name in names}
_PREFIXED = {
    prefix + unit
    for prefix in "pnuμµmckMGT"
    for unit in "m s g Hz eV V W J Pa N A F H Ω L l mol pc bar".split()
}
_LETTERS = set("mslghNJWVAKCFTL")  # units of one letter, in \text{} alone; M and k are numbers
_SHORT = {"cm", "mm", "km", "kg", "ft", "in", "yd", "mi", "min", "hr", "mph", "ml", "sec"}
_POWERS = {"square": "^2", "squared": "^2", "sq": "^2", "cubic": "^3", "cubed": "^3", "cu": "^3"}
_SCALES = {
    "dozen": 12,
    "hundred": 100,
    "thousand": 10**3,
    "million": 10**6,
    "billion": 10**9,
    "trillion": 10**12,
}
_COUNTED = set(
    """people men women children dice vertices matrices person way solution point integer number
    pair triple element student coin card ball root value term step move game""".split()
)
# Words that leave a value what it is.
_IDLE = set(
    """total altogether different distinct possible ordered positive old light st nd rd
    th""".split()
)
_LEAD = set(
    """a an the final answer result solution value total area volume length width height perimeter
    distance time speed cost price probability ratio angle radius we get have find there so thus
    hence therefore is are was""".split()
)
_SAYS = re.compile(r"(?::|\b(?:is|are|equals|equal to)):?\s*")
# Plurals that are numbers, verbs or comparisons. The endings -is, -us and -ss are no plurals.
_NOT_COUNTED = set(
    """dozens hundreds thousands millions billions trillions halves thirds quarters fourths fifths
    sixths sevenths eighths ninths tenths twelfths hundredths thousandths millionths percents times
    was has does means equals exceeds makes needs fails works perhaps always sometimes sevens others
    its yes couples scores""".split()
)
_NEGATING = set(
    """not no never non without less fewer more greater most least under over above below about
    around approximately approx roughly nearly almost wrong incorrect false minus negative twice
    half double""".split()
)
_WORD = re.compile(r"[^\W\d_]+'?|[%$°]")
_PLAIN_TAIL = re.compile(r"(?:[^\W\d_]|[\s%$°'.,(){}/])*")
_LEAD_LETTERS = re.compile(r"[A-Za-z\s.,:]*")
_EXPONENT = re.compile(r"\^ ?(?:\{(-?[0-9])\}|([0-9]))")


@dataclass(frozen=True)
class Unit:
    """What stands after a value: its unit in one spelling (None if none), and a factor."""

    name: str | None
    scale: int = 1


def read_unit(text: str) -> Unit | None:
    r"""The unit that text after a value says; None if other words are in it.

    ``inches^2`` and ``square inch`` are both ``in^2``. A noun in the plural counts things.
    """
    text = re.sub(r"\\text\{([^{}]*)\}", r" \1 ", text).replace(r"\cdot", " ")
    if not _PLAIN_TAIL.fullmatch(_EXPONENT.sub("", text)):
        return None
    name, power, scale, place = "", "", 1, 0
    for match in _WORD.finditer(text):
        name += _between(text[place : match.start()])
        place, word = match.end(), match.group()
        lower = word.lower()
        if lower == "per":
            name += "/"
        elif lower in _POWERS:
            power = _POWERS[lower]
        elif lower in _SCALES:
            scale *= _SCALES[lower]
        elif (unit := _one_unit(word)) is not None:
            name += unit
        elif lower in _IDLE:
            pass
        elif _counts(lower):
            name += lower[:-1] if lower.endswith("s") else lower
        else:
            return None
    name += _between(text[place:])
    if power and not name:
        return None  # 3 squared
    return Unit(name + power or None, scale)


def bare_unit(gap: str, text: str) -> Unit | None:
    """The unit in letters that follow a value without \\text; None where they are symbols."""
    first = re.split(r"[^a-zA-Z]", text, maxsplit=1)[0]
    if first.lower() not in _SHORT and not (gap and len(first) > 3):
        return None
    return read_unit(text)


def idle_lead(words: str) -> bool:
    """Whether words before a value leave it what it is ("The answer is", "Number of ways:")."""
    if not _LEAD_LETTERS.fullmatch(words) or negates(words):
        return False
    said = [match.end() for match in _SAYS.finditer(words)]
    if said and said[-1] == len(words):
        return True
    return all(word.lower() in _LEAD for word in _WORD.findall(words))


def negates(words: str) -> bool:
    """Whether words before a value or an equals sign deny or change it."""
    return any(word.lower() in _NEGATING for word in _WORD.findall(words))


def _one_unit(word: str) -> str | None:
    if len(word) == 1 and word.isascii() and word.isalpha():
        return word.lower() if word in _LETTERS else None
    if word in _PREFIXED:
        return _UNITS.get(word.lower(), word)
    lower = word.lower()
    if lower in _UNITS:
        return _UNITS[lower]
    return _UNITS.get(lower[:-1]) if len(lower) > 3 and lower.endswith("s") else None


def _counts(word: str) -> bool:
    """Whether a word counts things: a noun in the plural."""
    if word in _COUNTED:
        return True
    plural = len(word) > 3 and word.endswith("s") and not word.endswith(("is", "us", "ss"))
    return plural and word not in _NOT_COUNTED


def _between(text: str) -> str:
    """What of the characters between words belongs to a unit."""
    exponents = "".join("^" + (m.group(1) or m.group(2)) for m in _EXPONENT.finditer(text))
    return exponents + ("/" if "/" in text else "")
