r"""Takes the instruction off a problem that data sets put around it.

For instance "Let's think step by step and output the final answer within \boxed{}."; the roles'
prompts give their own.
"""

from __future__ import annotations

import re

# What stands between two sentences: space after a mark, or after a mark in quotes or brackets.
_BREAK = re.compile(r"""((?:(?<=[.?!])|(?<=[.?!][)\]"'”’*]))\s+|\n\s*)""")

# How an instruction starts: in any case at the start of a sentence, with a capital inside one
# (after a problem without a full stop).
_START = re.compile(
    r"(?:\A[\s*#>(\"“-]*|(?<=\s)(?=[A-Z]))"
    r"(?i:please|let['’]?s|let us|put|give|provide|write|output|present"
    r"|return|report|state|place|enclose|box|think|reason|solve|answer|show|explain|remember"
    r"|use|wrap|make sure|be sure|ensure|your (?:final )?(?:answer|response|solution)"
    r"|you (?:should|must|need)|the (?:final )?answer|the last line|at the end|finally)\b"
)
_FORM = re.compile(r"\bboxed\b|\bstep[ -]by[ -]step\b|\banswer:|####", re.IGNORECASE)

# An instruction about the form of the answer says nothing else: with any other word or sign in it
# ("as a fraction", "to two decimal places", a number, a formula) a sentence is the problem's own.
_TOKEN = re.compile(r"[^\W_]+(?:['’][^\W_]+)*|[^\s\w]|_")
_MARKS = frozenset(".,:;!?\"'’“”`()[]{}<>*#$\\-")
_WORDS = frozenset(
    """
    a after all also always and answer answering any as at be before box boxed brackets by can
    carefully clear clearly complete completely curly detail detailed do down each enclose
    enclosed ensure environment explain explanation final finally first following follows for form
    format from give given giving here i in inside into is it its last latex let let's lets let’s
    line make marked math mathematical mathematics must need note of on only our out output own
    place placed please present problem process provide provided put question quotes reason
    reasoning remember report response result return rigorous rigorously should show solution solve
    solving state step step's steps sure text that the then there think thinking this thorough
    thoroughly through to us use using with within without where work working wrap wrapped write
    writing written you your
    """.split()
)


def without_instructions(text: str) -> str:
    r"""The text without its sentences about the form of the answer; all others stay as they are.

    A sentence is dropped if it starts as an instruction (Please, Let's, Put, ...), speaks of
    ``\boxed``, "step by step" or "Answer:", and says nothing else. A text that is nothing but such
    sentences stays whole. Surrounding space is stripped. Linear in the length of the text.
    """
    text = text.strip()
    if not _FORM.search(text):
        return text
    kept, gap = [], ""
    pieces = _BREAK.split(text)
    for sentence, after in zip(pieces[::2], [*pieces[1::2], ""], strict=True):
        start = _instruction(sentence)
        if start is None:
            kept += [gap, sentence]
            gap = after
            continue
        if head := sentence[:start].rstrip():
            kept += [gap, head]
            gap = after
        elif "\n" not in gap:
            gap = after
        if sentence.endswith(" ?"):  # "... within \boxed{} ?": the mark is the problem's
            kept.append(" ?")
    rest = "".join(kept).strip()
    if rest == text:
        return text
    if rest.endswith(" ?") and rest[:-2].rstrip().endswith((".", "?", "!")):
        rest = rest[:-2].rstrip()  # a mark of its own, behind that of the problem
    return rest if any(char.isalnum() for char in rest) else text


def _instruction(sentence: str) -> int | None:
    """Where the instruction begins that this sentence is or ends with; None: there is none."""
    if not _FORM.search(sentence):
        return None
    own = 0  # where the last word ends that no instruction holds
    for token in _TOKEN.finditer(sentence):
        if token[0].lower() not in _WORDS and token[0] not in _MARKS:
            own = token.end()
    start = _START.search(sentence, own)
    return start.start() if start and _FORM.search(sentence, start.start()) else None
