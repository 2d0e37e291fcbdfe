import gc
import threading
from typing import Any

import pytest
import torch

import hopline as hl
from hopline import recording
from hopline.data import planted
from tests.runs import losses, sage


def test_who_has_the_turn_has_it_alone_and_may_ask_again():
    others: list[bool] = []

    def ask() -> None:
        taken = recording.turn.acquire(blocking=False)
        others.append(taken)
        if taken:
            recording.turn.release()

    with recording.turn, recording.turn:
        thread = threading.Thread(target=ask)
        thread.start()
        thread.join()
    ask()
    assert others == [False, True]


def test_what_can_wait_for_another_time_does_not_wait_for_its_turn():
    begun, ended, found = threading.Event(), threading.Event(), []

    def evaluate() -> None:
        with recording.turn:
            begun.set()
            ended.wait()

    thread = threading.Thread(target=evaluate)
    thread.start()
    begun.wait()
    with recording.at_once() as free:
        found.append(free)
    ended.set()
    thread.join()
    for _ in range(2):
        with recording.at_once() as free:
            found.append(free)
    assert found == [False, True, True]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("layout", ["tree", "block"])
@pytest.mark.parametrize(
    "where", [{"graph": "device"}, {"graph": "host"}, {"features": "pinned", "cache": "200kB"}], ids=str
)
def test_evaluation_in_its_own_stream_ends_with_the_run_that_waited(layout: str, where: dict[str, Any]):
    data = planted(num_nodes=20_000, num_edges=200_000, num_train=4096)
    if layout == "tree" and where.get("graph") == "host":
        pytest.skip("trees are drawn on the GPU")
    found = {}
    for how in ("blocking", "async"):
        torch.manual_seed(0)
        model = sage(data, dropout=0.5)
        method = hl.Sampled(fanouts=(5, 5), batch_size=256, layout=layout)  # type: ignore[arg-type]
        placement = hl.Placement(**where)
        options = {"epochs": 6, "evaluate": how, "device": "cuda", "show": False, "patience": 2, "lr": 0.05}
        run = hl.Trainer(model, data, method, placement=placement, **options).fit()
        evaluations = [(e.epoch, e.split, e.metrics) for e in run.evaluations]
        found[how] = losses(run), evaluations, run.epochs, run.best_epoch, run.test
        found[how, "weights"] = model.state_dict()
    assert found["blocking"] == found["async"]
    pairs = zip(found["blocking", "weights"].values(), found["async", "weights"].values(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_graph_is_recorded_while_another_thread_waits_for_its_copies():
    graph, ended = torch.cuda.CUDAGraph(), threading.Event()
    stream = recording.stream_to_record("this", torch.device("cuda"))
    x, failures = torch.ones(1000, device="cuda"), []

    def wait_again_and_again() -> None:
        copies, source = torch.cuda.Stream(), torch.ones(1 << 20).pin_memory()
        try:
            while not ended.is_set():
                with torch.cuda.stream(copies):
                    source.to("cuda", non_blocking=True)
                    copies.record_event().synchronize()
        except RuntimeError as error:
            failures.append(error)

    thread = threading.Thread(target=wait_again_and_again)
    thread.start()
    try:
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream), recording.recorded(graph, stream):
            for _ in range(2000):
                x += 1
    finally:
        ended.set()
        thread.join()
    graph.replay()
    assert not failures
    assert float(x[0]) == 2001


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("evaluate", ["blocking", "async"])
@pytest.mark.parametrize("layout", ["tree", "block"])
def test_a_run_leaves_no_more_on_a_gpu_than_the_one_before(layout: str, evaluate: str):
    data, left = planted(num_nodes=20_000, num_edges=200_000, num_train=4096), []
    for _ in range(4):
        model = sage(data, dropout=0.5)
        method = hl.Sampled(fanouts=(5, 5), batch_size=256, layout=layout)  # type: ignore[arg-type]
        hl.Trainer(model, data, method, epochs=4, evaluate=evaluate, device="cuda", show=False).fit()
        del model
        gc.collect()
        torch.cuda.empty_cache()
        left.append((torch.cuda.memory_allocated(), torch.cuda.memory_reserved()))
    assert left[1] == left[3]
