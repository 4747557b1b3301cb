"""Reading the Prometheus text format."""

from __future__ import annotations

import math

import pytest

from kvoffload.metrics.scrape import Sample, samples, sums

TEXT = """\
# HELP vllm:prompt_tokens_total Prompt tokens, with {braces} and "quotes" 7
# TYPE vllm:prompt_tokens_total counter
vllm:prompt_tokens_total{engine="0",model_name="a/b"} 1024.0
vllm:prompt_tokens_total{engine="1",model_name="a/b"} 1.5e+03

process_cpu 2
up{job="x",} 1 1700000000000
latency_bucket{le="+Inf"} 3.0 # {trace_id="abc"} 0.67 1520879607.789
nothing{a="b"
wrong{a="b"} many
odd{path="C:\\\\dir",text="a \\"quoted\\" }\\nline"} +Inf
gap NaN
"""


def test_samples_are_read_and_other_lines_skipped() -> None:
    read = samples(TEXT)
    assert read[:5] == [
        Sample("vllm:prompt_tokens_total", {"engine": "0", "model_name": "a/b"}, 1024.0),
        Sample("vllm:prompt_tokens_total", {"engine": "1", "model_name": "a/b"}, 1500.0),
        Sample("process_cpu", {}, 2.0),
        Sample("up", {"job": "x"}, 1.0),
        Sample("latency_bucket", {"le": "+Inf"}, 3.0),
    ]
    assert read[5] == Sample("odd", {"path": "C:\\dir", "text": 'a "quoted" }\nline'}, math.inf)
    assert read[6].name == "gap"
    assert math.isnan(read[6].value)
    assert len(read) == 7


@pytest.mark.parametrize("separator", ["\u2028", "\x85", "\x0b", "\x1c"])
def test_only_a_line_feed_ends_a_line(separator: str) -> None:
    """A tenant's name can contain any character, and Prometheus escapes only the line feed."""
    read = samples(f'held{{tenant="a{separator}b"}} 1\r\nheld{{tenant="c"}} 2')
    assert read == [Sample("held", {"tenant": f"a{separator}b"}, 1.0), Sample("held", {"tenant": "c"}, 2.0)]


def test_sums_are_over_labels() -> None:
    assert sums(samples(TEXT))["vllm:prompt_tokens_total"] == 2524.0


@pytest.mark.parametrize("text", ["", "<html>no metrics</html>", "{}", "a{", "# only a comment"])
def test_invalid_texts_have_no_samples(text: str) -> None:
    assert samples(text) == []


def test_a_line_of_digits_takes_no_quadratic_time() -> None:
    """Regression: a regular expression took minutes for half a million digits."""
    assert samples("x " + "1" * 500_000 + "z") == []
