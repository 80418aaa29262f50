"""The training loop: steps, evaluations, checkpoints and the record of them."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

from .. import runlog
from ..data.order import arrange
from ..errors import RunError
from .agreed import Said
from .driver import OnGradients
from .evaluate import evaluate
from .feed import Feed, Seat
from .general import General
from .job import Job
from .making import alone, apply, grid_for
from .mesh import World
from .nonfinite import cause, remedy, save_samples
from .outcome import OnStep, Outcome
from .route import Came, MakeRoute, Native, Route
from .saver import Saving
from .state import Progress, State
from .tally import Tally
from .verdict import diverged
from .workers import Team


def train(
    job: Job,
    world: World,
    *,
    log: runlog.Writer | None = None,
    stop: Callable[[], bool] | None = None,
    save: Saving | None = None,
    load: Callable[[State], Progress] | None = None,
    progress: OnStep | None = None,
    on_gradients: OnGradients | None = None,
    make_route: MakeRoute | None = None,
) -> Outcome:
    """Train a job on this process; all processes call it together.

    `log` and `progress` matter on rank 0. `stop` is asked after each step on every rank; one that
    says yes ends the run on all. `save` begins a checkpoint every `checkpoint_every` steps and
    at the end. `load` fills the state's tensors in place and says how far the run had come.
    `make_route` makes how all workers of an algorithm do their steps in this one process.

    Raises RunError on all ranks when more than `max_skipped` steps in a row were not finite.
    """
    run = Run(
        job, world, stop=stop, progress=progress, on_gradients=on_gradients, make_route=make_route
    )
    if load is not None:
        run.load(load)
    return run.play(log=log, save=save)


class Run:
    """`train` in its parts, for whoever writes nothing before the state is loaded."""

    def __init__(
        self,
        job: Job,
        world: World,
        *,
        stop: Callable[[], bool] | None = None,
        progress: OnStep | None = None,
        on_gradients: OnGradients | None = None,
        make_route: MakeRoute | None = None,
    ) -> None:
        self.job, self.world, self.stop = job, world, stop
        self.save: Saving | None = None
        self.progress = progress if world.is_first else None
        settings, plan = job.train, job.plan
        grid = grid_for(plan)
        is_plain = job.algorithm.is_plain and not job.general
        all_here = make_route is not None and not is_plain
        self.applied = apply(
            job.graph,
            alone(plan) if all_here else plan,
            world.apart() if all_here else world,
            seed=settings.seed,
            compile_layers=settings.compile,
            apart=not is_plain and not all_here,
        )
        self.order = arrange(
            job.source,
            job.partition,
            n_workers=grid.replica,
            global_batch=settings.global_batch,
            seed=settings.seed,
            tail=settings.tail,
        )
        if settings.steps is not None:
            self.n_steps = settings.steps
        else:
            assert settings.epochs is not None, "the spec gives steps or epochs"
            self.n_steps = self.order.n_steps(settings.epochs)
        self.route: Route
        self.team: Team | None = None
        if is_plain:
            self.feed = self._feed(self.applied.places.cell.replica, grid.replica)
            self.route = Native(
                job,
                self.applied,
                world,
                self.feed,
                self.n_steps,
                say=self._said,
                on_gradients=on_gradients,
            )
        else:
            assert on_gradients is None, "workers have gradients of their own"
            n = grid.replica
            which = self.applied.places.team[0]
            feeds = {each: self._feed(each, n) for each in (range(n) if all_here else (which,))}
            self.feed = feeds[which]
            self.team = Team(job, self.applied, feeds, self.order, n, self.n_steps)
            self.route = (make_route or General)(self.team, self.applied, world, say=self._said)
        self.state = self.route.state
        self.grid = grid
        # Where one process plays all workers, it scores all samples.
        alone_here = world.n_ranks == 1
        self.data_rank = 0 if alone_here else grid.data_rank(sorted(grid.devices)[world.rank])
        self.n_data = 1 if alone_here else grid.degrees.data
        share = -(-settings.global_batch // self.n_data)
        self.eval_batch = -(-share // plan.microbatches)
        self.metrics: dict[str, float] = {}
        self.evaluated: int | None = None
        self.final_loss: float | None = None
        self.step_s: list[float] = []
        self.compute_s: list[float] = []
        self.n_skipped = 0
        self.reached = False  # whether what `goal` asks for was seen
        self.tally = Tally()
        self._left_out: tuple[int, ...] = ()  # those that step on their own and last could not
        self.peak_bytes = 0
        self.start_s = time.monotonic()

    def _feed(self, worker: int, n_workers: int) -> Feed:
        job, places = self.job, self.applied.places
        return Feed(
            source=job.source,
            order=self.order,
            graph=job.graph,
            seat=Seat(
                worker=worker,
                n_workers=n_workers,
                part=places.cell.shard,
                n_parts=places.grid.shard,
            ),
            device=self.world.device,
            n_microbatches=job.plan.microbatches,
            reads=self.applied.stage.reads,
            attack=job.attack,
        )

    def load(self, load: Callable[[State], Progress]) -> Progress:
        """Go on from where `load` says that the run had come."""
        found = load(self.state)
        self.state.restored(found)
        return found

    def play(self, *, log: runlog.Writer | None = None, save: Saving | None = None) -> Outcome:
        """All steps that are left."""
        self.log, self.save = log if self.world.is_first else None, save
        done = self.state.progress.step
        if done >= self.n_steps and self.world.is_first:
            sys.stderr.write(
                f"polyreme: nothing to do: of {self.n_steps} steps {done} are done already\n"
            )
        stopped = False
        self.applied.stage.train()
        self.world.record.enter("training")
        with closing(self.route.steps(done, self.n_steps)) as rounds:
            for came in rounds:
                before = done
                if self.save is not None:  # what was said in the round's one exchange
                    self.save.heard([said.save for said in came[-1].result.said])
                for each in came:
                    stopped = self._took(each)
                done = self.state.progress.step
                if not stopped and _due(self.job.train.eval_every, before, done):
                    stopped = self._evaluate()
                if stopped or self.reached:
                    break
                if _due(self.job.train.checkpoint_every, before, done):
                    if self.job.train.keep_best is not None and self.evaluated != done:
                        stopped = self._evaluate()
                        if stopped:
                            break
                    self._save()
                self.route.begin()
        if not stopped and self.evaluated != done:
            stopped = self._evaluate()
        if self.log is not None:
            self.tally.write(self.log, done)
        if self._saved() != done:  # it was not due, or failed
            self._save()
            self._saved()
        return Outcome(
            status="done"
            if self.evaluated == done and (self.reached or done >= self.n_steps)
            else "interrupted",
            steps=done,
            samples=self.state.progress.samples,
            tokens=self.state.progress.tokens,
            seconds=time.monotonic() - self.start_s,
            final_loss=self.final_loss,
            metrics=self.metrics,
            step_s=tuple(self.step_s),
            compute_s=tuple(self.compute_s),
            wire_bytes=self.route.sent_bytes,
            peak_bytes=self.peak_bytes,
            skipped=self.n_skipped,
            state=self.state,
        )

    def _took(self, came: Came) -> bool:
        """Count and record a step; whether a rank wants the run to end."""
        settings, before, result = self.job.train, self.state.progress, came.result
        if not self.applied.places.agree(result.trails):
            raise diverged(self.world)
        self.state.progress = Progress(
            step=before.step + 1,
            samples=before.samples + came.n_samples,
            tokens=before.tokens + came.n_samples * self.feed.tokens_per_sample,
            skipped_in_row=before.skipped_in_row + 1 if result.skipped else 0,
        )
        self.step_s.append(result.times.step_s)
        self.compute_s.append(result.times.compute_s)
        self.n_skipped += result.skipped
        if (log := self.log) is not None:
            for rank, what in came.faults:
                log.write(runlog.FaultEvent(t=log.t, attempt=log.attempt, what=what, rank=rank))
        self.tally.add(came)
        self.reached = self.reached or settings.goal.met(came.gap, came.gradient)
        self.peak_bytes = max(self.peak_bytes, result.memory_bytes)
        if not result.skipped:
            self.final_loss = result.loss
        self._record(came)
        if self.state.progress.skipped_in_row > settings.max_skipped:
            rule = (
                f"{self.state.progress.skipped_in_row} steps in a row were skipped, more than "
                "train.max_skipped"
            )
            raise self._not_finite(rule, came)
        if self.state.progress.skipped_in_row == self.n_steps:
            raise self._not_finite("every step of the run was skipped", came)
        return result.stop

    def _said(self) -> Said:
        return Said(
            stop=self.stop is not None and self.stop(),
            save=0 if self.save is None else self.save.stage,
        )

    def _not_finite(self, rule: str, came: Came) -> RunError:
        """The error that ends a run, the same on all ranks; those to blame keep their samples.

        A checkpoint under way is completed.
        """
        step, folder, result = self.state.progress.step, self.job.folder, came.result
        kept = ""
        if folder is not None and result.bad_ranks:
            home = folder / "nonfinite"
            failed = next(filter(None, self.world.gather(self._keep_samples(home, came))), None)
            kept = f"; their samples are in {home}"
            if failed is not None:
                kept = f"; their samples could not be kept: {failed}"
        try:
            self._saved()
        except RunError as error:
            kept += f"; {error}"
        assert result.reason is not None, "skipped steps have a reason"
        if result.bad_ranks:
            kept += f"; {remedy(self.job.algorithm.rule.lr, self.job.train.clip_norm)}"
        why = cause(result.reason, result.bad_ranks)
        return RunError(f"step {step}: {rule}; the last because {why}{kept}", rank=result.rank)

    def _keep_samples(self, home: Path, came: Came) -> str | None:
        """Why samples could not be written, if this process had to and could not."""
        step, result = self.state.progress.step, came.result
        assert result.reason is not None, "skipped steps have a reason"
        for rank in came.read.keys() & set(result.bad_ranks):
            ids, read = came.read_ids(rank), came.read[rank]
            try:
                save_samples(home, step=step, rank=rank, reason=result.reason, ids=ids, read=read)
            except OSError as error:
                return f"{error.filename or home}: {error.strerror or error}"
        return None

    def _record(self, came: Came) -> None:
        now, result = self.state.progress, came.result
        if self.progress is not None:
            self.progress(
                step=now.step,
                n_steps=self.n_steps,
                loss=result.loss,
                samples_per_s=came.n_samples / result.times.step_s,
                memory_bytes=result.memory_bytes,
            )
        if result.reason is not None and now.skipped_in_row == 1 and self.world.is_first:
            why = cause(result.reason, result.bad_ranks)
            sys.stderr.write(f"polyreme: step {now.step} is skipped: {why}\n")
        elif result.reason is None and result.bad_ranks and self.world.is_first:
            if result.bad_ranks != self._left_out:
                why = cause("what is not finite", result.bad_ranks)
                sys.stderr.write(f"polyreme: step {now.step} goes on without {why}\n")
            self._left_out = result.bad_ranks
        listed, last = self.job.train.log_samples, self.reached or now.step == self.n_steps
        due = last or now.step % self.job.train.log_every == 0
        if self.log is None or not (due or result.skipped):
            return
        self.log.write(came.event(self.log, now.step, self.feed.tokens_per_sample, lists=listed))

    def _evaluate(self) -> bool:
        """Evaluate, and say whether a rank wants the run to end: then there is nothing to show."""
        with self.world.record.doing("evaluating"):
            self.route.settle()
            found = evaluate(
                self.applied,
                self.world,
                self.job.source,
                self.feed,
                data_rank=self.data_rank,
                n_data=self.n_data,
                batch=self.eval_batch,
                stop=self.stop,
            )
        if found is None:
            return True
        self.evaluated = self.state.progress.step
        if self.team is not None:
            found |= self.team.certified(self.applied, self.world)
            self.reached |= self.job.train.goal.met(found.get("gap"), found.get("gradient"))
        if not found:
            return False
        self.metrics = found
        if self.log is not None:
            self.log.write(
                runlog.EvalEvent(
                    t=self.log.t,
                    attempt=self.log.attempt,
                    step=self.state.progress.step,
                    metrics=self.metrics,
                )
            )
        return False

    def _save(self) -> None:
        if self.save is None:
            return
        step = self.state.progress.step
        with self.world.record.doing("saving a checkpoint"):
            self.save.begin(self.state, self.metrics if self.evaluated == step else {})

    def _saved(self) -> int | None:
        """The step of the newest complete checkpoint, once none is under way."""
        if self.save is None:
            return None
        with self.world.record.doing("saving a checkpoint"):
            return self.save.finish()


def _due(every: int | None, before: int, done: int) -> bool:
    """Whether a multiple of `every` came with the last steps."""
    return every is not None and done // every > before // every
