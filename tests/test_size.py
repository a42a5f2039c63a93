"""The counts of `tools.size`, and their limits."""

from tools.size import MOST_LINES, MOST_OPTIONS, attribute_counts, code_lines, excesses

SOURCE = '''"""A text
of two lines."""

# a comment
class Pair:
    """A docstring."""

    left_limit: int = 0

    def __init__(self, a, b):
        self.a = a  # a comment beside code
        self.a, self.b = (
            a,
            b,
        )
        other.c = """no
docstring"""
'''


def test_code_lines_leave_out_blank_lines_comments_and_docstrings():
    assert code_lines(SOURCE) == 10


def test_attributes_are_what_methods_set_on_self():
    assert list(attribute_counts(SOURCE)) == [("Pair", 2)]


def test_each_count_above_its_limit_is_named():
    lines = {folder: limit + 1 for folder, limit in MOST_LINES.items()}
    classes = {"a.py:B": 16, "a.py:C": 17}
    complaints = list(excesses(lines, MOST_OPTIONS + 1, classes))
    words = ["rocket_sink has", "tests has", "options", "a.py:C has 17 attributes"]
    assert len(complaints) == len(words)
    assert all(word in text for word, text in zip(words, complaints, strict=True))
    assert not list(excesses(MOST_LINES, MOST_OPTIONS, {"a.py:B": 16}))
