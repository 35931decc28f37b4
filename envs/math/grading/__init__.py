r"""Grading of boxed answers.

    grade(r"Hence \boxed{\frac{2}{3}}.", "2/3")  ->  Grade(correct=True, answer="\\frac{2}{3}")

The answer is the content of the response's last ``\boxed{...}``. Plain numbers and identical texts
are decided here, in linear time; all else is read and compared in a pool of worker processes that
can be killed (never forked: the caller may hold threads and accelerators). Any thread may grade.
What passes a limit of length, nesting, time or memory is undecided: ``Grade.error`` says so.

Conventions, where mathematics alone does not decide:

* No box, an empty box, or a last box that generation cut: no answer. A stray number in prose is
  none, and an earlier box does not count once another was opened.
* No tolerance: a rounded decimal of an exact gold (0.3333333 for 1/3, 9.42 for 3\pi) is wrong, and
  an integer of any length is compared in full.
* Units: one side with a unit and one without agree if the values do; two different units do not,
  and nothing is converted. Currency signs are units, and so is a noun in the plural ("7 apples").
  Million, dozen and their like multiply. Words that name the value ("Area:", "The area is") are
  dropped. Any other word beside a value ("at least 5") makes the answer a text, which agrees with
  the same words alone.
* Percent: 50, 0.5 and 50\% all agree with 50\%; 50\% agrees with 50 and with 0.5.
* Degrees: 30 and \pi/6 agree with 30^\circ. Inside a function 60^\circ is an angle.
* Words and choice letters compare without case, symbols with it. A choice letter may be followed by
  its value: "(B) 12" agrees with B and with 12.
* Lists and sets are unordered, tuples and intervals ordered with their brackets; a list needs all
  of the gold's items and no other. A bare list is not a tuple.
* Intervals, inequalities, set-builder notation and membership are read alike. Equations agree if
  they are multiples of each other.
* An assignment agrees with its value: of a name (x, AB, f(x)), of an expression in several unknowns
  or a function of one (m + n = 5, \cos x = 1/2), of words (Area = 5). An equation in one unknown
  (2x = 5), a function at a given number (f(8) = 5) and a wrong sum (8 = 5) do not. What stands
  between (x = 2+3 = 5) must be equal too. A bare list follows the order of a gold's names.
* I(0) and y' are unknowns of their own; n(n+1) is a product. Where something is rounded, letters
  i to n, p, K, M and N are whole numbers. Dots (1, 2, \ldots) are an item of their own.
* a:b is a quotient. A number with a stated base agrees with its digits alone, and with another base
  by value. Expressions agree by value, in whatever form (factored or not).
* 1,000, 1\,000 and 1 000 are one number; "1, 000" and "1,2,3" are lists.
"""

from envs.math.grading.pool import (
    CRASH,
    MEMORY_LIMIT,
    TIME_LIMIT,
    Grade,
    GraderPool,
    default_pool,
    grade,
)

__all__ = [
    "CRASH",
    "MEMORY_LIMIT",
    "TIME_LIMIT",
    "Grade",
    "GraderPool",
    "default_pool",
    "grade",
]
