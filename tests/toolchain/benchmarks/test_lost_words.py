"""What counts as lost under a condition."""

from benchmarks.batch_reader import Reading
from benchmarks.lost_words import change, num_rightly_read

TRUTH = "the train was late again and nobody had told us why"


def test_a_word_is_lost_if_only_the_plain_transcript_has_it() -> None:
    plain = "The tram was late again, and nobody had told us why."
    under_noise = Reading("The tram was late, and somebody had to, told us why.", [], ("dropped",))
    found = change(TRUTH, plain, under_noise)
    assert (found.num_right, found.lost, found.num_lost) == (10, ("again", "nobody"), 2)
    assert (found.num_invented, found.dropped) == (1, ("dropped",))


def test_a_word_that_only_the_condition_shows_is_no_loss() -> None:
    assert change(TRUTH, "The tram was late", Reading("The train was late", [])).lost == ()


def test_dropped_text_is_right_if_it_is_said_and_nowhere_in_the_answer() -> None:
    dropped = ("nobody had told us why", "Thank you.", "the train was late")
    assert num_rightly_read(TRUTH, Reading("The train was late again", [], dropped)) == 5
