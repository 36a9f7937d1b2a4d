"""The histogram that is filled at every token, beside the library's."""

from prometheus_client import CollectorRegistry, Histogram, generate_latest

from tenuto_server.api.meters import QuickHistogram


def test_it_says_what_the_library_would():
    bounds = (0.01, 0.5, 1, 2.5)
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    quick = QuickHistogram("gap_seconds", "Between.", bounds)
    ours.register(quick)
    slow = Histogram("gap_seconds", "Between.", buckets=bounds, registry=theirs)
    for value in (0.0, 0.005, 0.01, 0.0100001, 0.7, 1.0, 2.5, 2.6, 1e9):
        quick.observe(value)
        slow.observe(value)
    # The library adds when a histogram was made, which says nothing of what it holds.
    expected = [line for line in generate_latest(theirs).splitlines() if b"_created" not in line]
    assert generate_latest(ours).splitlines() == expected
