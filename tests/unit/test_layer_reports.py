from blockferry.connectors.compute_progress import ComputeProgress, StepMark
from blockferry.engine.worker.layer_reports import LayerReports


def test_a_layer_with_two_caches_reports_the_later_one():
    progress = ComputeProgress()
    reports = LayerReports(progress, (0, 0, 1, 2, 2))
    reports.begin(7)
    reports.layer_done(0)
    assert progress.has_reached(StepMark(7, 1))
    assert not progress.has_reached(StepMark(7, 2))
    reports.layer_done(2)
    assert progress.has_reached(StepMark(7, 4))


def test_caches_in_another_order_than_layers_are_done_with_the_step():
    progress = ComputeProgress()
    reports = LayerReports(progress, (0, 1, 0, 1))
    reports.begin(7)
    reports.layer_done(1)
    assert not progress.has_reached(StepMark(7, 0))
    reports.end()
    assert progress.has_reached(StepMark(7, 3))
    assert not progress.has_reached(StepMark(8, 0))


def test_whoever_waits_is_woken_by_the_layer_and_not_before():
    progress, wakes = ComputeProgress(), []
    progress.await_mark(StepMark(3, 1), lambda: wakes.append(1))
    progress.reach(3, 0)
    assert not wakes
    progress.reach(3, 1)
    assert wakes
