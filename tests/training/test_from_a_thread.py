"""`fit` outside the main thread, where signals cannot be caught. Ray Train and servers call it so."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import hopline as hl
from hopline.training.callbacks import EpochEnd
from tests.support.runs import losses, method, sage, small

DATA = small()


def in_a_thread(function: Callable[[], Any]) -> Any:
    """Call a function in a new thread, and return or raise what it does."""
    results: list[Any] = []
    errors: list[BaseException] = []

    def call() -> None:
        try:
            results.append(function())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=call)
    thread.start()
    thread.join(timeout=120)
    assert not thread.is_alive()
    if errors:
        raise errors[0]
    return results[0]


class Fail(hl.Callback):
    """Raises after the second epoch, as a kill would end the run."""

    def on_epoch_end(self, trainer: hl.Trainer, epoch: EpochEnd) -> None:
        if epoch.epoch == 2:
            raise OSError("the disk is gone")


def fit(
    out: Path | None = None,
    callbacks: tuple[hl.Callback, ...] = (),
    model: hl.nn.GNN | None = None,
    **settings: Any,
) -> tuple[list[float], Any]:
    model = model or sage(DATA, dropout=0.3)
    options: dict[str, Any] = {"epochs": 3, "show": False, "checkpoint_s": 0.0} | settings
    run = hl.Trainer(model, DATA, method(), out=out, callbacks=callbacks, **options).fit()
    return losses(run), torch.cat([p.detach().flatten() for p in model.parameters()]).tolist()


@pytest.mark.parametrize("settings", [{}, {"evaluate": "async"}, {"budget": "1GiB"}], ids=str)
def test_a_run_is_the_same_in_a_thread_with_and_without_a_folder(settings: dict[str, Any], tmp_path: Path):
    expected = fit(**settings)
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    threads = torch.get_num_threads()
    assert in_a_thread(lambda: fit(**settings)) == expected
    assert in_a_thread(lambda: fit(tmp_path / "run", **settings)) == expected
    assert (tmp_path / "run" / "checkpoint.pt").exists()
    assert (tmp_path / "run" / "report.html").exists()
    assert {number: signal.getsignal(number) for number in handlers} == handlers
    assert torch.get_num_threads() == threads


def test_a_run_that_failed_in_a_thread_is_resumed_in_another_one(tmp_path: Path):
    expected = fit()
    with pytest.raises(OSError, match="the disk is gone"):
        in_a_thread(lambda: fit(tmp_path / "run", (Fail(),)))
    assert in_a_thread(lambda: fit(tmp_path / "run", resume=True)) == expected


def test_two_threads_train_at_once(tmp_path: Path):
    expected = fit()
    results: dict[int, Any] = {}
    # Weights are drawn from torch's generator, which threads share: both models are made before the threads start.
    models = [sage(DATA, dropout=0.3) for _ in range(2)]

    def call(number: int) -> None:
        results[number] = fit(tmp_path / str(number), model=models[number])

    threads = [threading.Thread(target=call, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=120)
    # Both draw dropout by keys, and torch's own generator is not used by these convs.
    assert results == {0: expected, 1: expected}
