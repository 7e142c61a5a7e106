"""`HetSlurmExecutor`: a submitit executor for jobs of several components, each of which is an ordinary submitit job.

    executor = HetSlurmExecutor(folder)
    job = executor.submit_het(
        Component("trainer", train, (config,), nodes=2, partition="train", gpus_per_node=8),
        Component("inference", serve, nodes=4, partition="infer", gpus_per_node=8),
    )
    job["trainer"].results()                          # one of every task; ranks count from 0 in each component
    job["inference"].cancel()                         # that component alone; job.cancel() all

On SIGUSR2, which every component gets before the time limit, a function with submitit's `checkpoint` is pickled anew and its
component ends. Once all have ended, the batch host has Slurm run the whole job again, once; those with results are left out. A
function with a true attribute `handles_signals` is left alone with it.
"""

from __future__ import annotations

import json
import os
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

from submitit.core import plugins, utils
from submitit.core.core import EquivalenceDict, Job
from submitit.slurm.slurm import SlurmExecutor, SlurmJob, SlurmJobEnvironment

from prl.launch.slurm.environment import ask, hostnames, scrubbed
from prl.launch.slurm.script import Component, Submission, submission
from prl.launch.slurm.state import Watcher
from prl.launch.slurm.submit import sbatch

R = TypeVar("R", covariant=True)
_ALONE = "main"
"""The component of a job that has no other."""


class Ended(Exception):
    """Raised by a component's function: it ends without a result and its task with this exit code, not 0."""

    def __init__(self, code: int, cause: str):
        super().__init__(code, cause)
        self.code = code

    def __str__(self) -> str:
        return str(self.args[1])


def installed() -> str:
    """What keeps submitit from finding this executor; empty where nothing does."""
    if HetSlurmExecutor.name() in plugins.get_job_environments():
        return ""
    return (
        "submitit does not know the executor hetslurm, which prl registers as it is installed; install prl (pip install -e .)"
    )


class HetSlurmJobEnvironment(SlurmJobEnvironment):
    """A task of a component. Its job id is the first component's everywhere, as Slurm has it."""

    @property
    def hostnames(self) -> list[str]:
        """The component's nodes, in the order of their ranks."""
        return list(hostnames(os.environ[self._env["nodes"]]))

    def _handle_signals(self, paths: utils.JobPaths, submission: utils.DelayedSubmission) -> None:
        if not getattr(submission.function, "handles_signals", False):
            super()._handle_signals(paths, submission)

    def _requeue(self, countdown: int) -> None:
        """Leave word for the batch host: only a whole job can be requeued, and not before every component has saved."""
        self.paths.folder.joinpath(f"{self.job_id}_again").touch()


class ComponentJob(SlurmJob[R]):
    """One component. `key` is what Slurm calls it: `J+1`, or `J` where the job is homogeneous."""

    watcher = Watcher()

    def __init__(
        self, folder: Path | str, job_id: str, tasks: Sequence[int] = (0,), *, key: str | None = None, shared: bool = False
    ):
        self.key, self.shared = key or job_id, shared
        super().__init__(folder, job_id, tasks)
        for task in self._sub_jobs:
            task.key = self.key  # type: ignore[attr-defined]

    def _register_in_watcher(self) -> None:
        """The watcher knows a job from when it is first asked for."""

    @property
    def exit_code(self) -> int | None:
        """What its tasks ended with, where they have ended by themselves and the job is not about to be run again."""
        at = self.paths.folder / self.job_id
        try:
            return None if Path(f"{at}_again").exists() else int(Path(f"{at}_ended").read_text())
        except (FileNotFoundError, ValueError):
            return None

    def done(self, force_check: bool = False) -> bool:
        """Whether it has a result, its tasks have ended without one, or Slurm has ended it."""
        if self._sub_jobs:
            return all(task.done(force_check) for task in self._sub_jobs)
        if self.paths.result_pickle.exists() or self.exit_code is not None:
            return True
        return self.watcher.is_done(self.key, mode="force" if force_check else "standard")

    @property
    def state(self) -> str:
        """Slurm's word for it, or, where that is RUNNING though its tasks have ended, how they did."""
        told = self.watcher.get_state(self.key)
        if told == "RUNNING" and (code := self.exit_code) is not None:
            return "FAILED" if code else "COMPLETED"
        return told

    def get_info(self, mode: str = "force") -> dict[str, str]:
        return self.watcher.get_info(self.key, mode=mode)

    def cancel(self, check: bool = True) -> None:
        """End this component; with the first Slurm ends all, and while it waits, none but the first. OSError with its words."""
        if self.shared:
            raise OSError(f"job {self.job_id} is homogeneous: its components end together, by the whole job's cancel()")
        try:
            ask("scancel", self.key)
        except OSError:
            if check:
                raise


@dataclass(frozen=True)
class HetJob:
    """A submitted job, its components by their names."""

    job_id: str
    components: Mapping[str, ComponentJob[Any]]

    @classmethod
    def load(cls, folder: Path, job_id: str) -> HetJob:
        """A job that was submitted from here or elsewhere, with the executor's folder."""
        known = json.loads((folder / f"{job_id}.json").read_text())
        jobs = {}
        for i, (name, tasks) in enumerate(known["components"].items()):
            key = f"{job_id}+{i}" if known["heterogeneous"] else job_id
            shared = not known["heterogeneous"] and len(known["components"]) > 1
            jobs[name] = ComponentJob[Any](folder / name, job_id, tuple(range(tasks)), key=key, shared=shared)
        return cls(job_id, jobs)

    def __getitem__(self, name: str) -> ComponentJob[Any]:
        return self.components[name]

    def cancel(self) -> None:
        """End every component."""
        ask("scancel", self.job_id)


class HetSlurmExecutor(SlurmExecutor):
    """Submits from wherever it runs, another job included: nothing of an enclosing job is handed on.

    `environment` is what the job inherits, by default this process's. `submit` makes jobs of one component, whose options
    `update_parameters` takes: those of `Component`.
    """

    job_class = ComponentJob

    def __init__(self, folder: Path | str, max_num_timeout: int = 3, *, environment: Mapping[str, str] | None = None):
        if why := installed():
            raise OSError(why)
        super().__init__(folder, max_num_timeout)
        self.environment = scrubbed(os.environ if environment is None else environment)

    def submit_het(self, *components: Component, name: str = "submitit", **options: Any) -> HetJob:
        """One job of several components; `options` are those of `Submission`. OSError where Slurm does not take it."""
        given = {"log": self.folder / "batch.log", "chdir": Path.cwd()} | options
        return self.submit_job(Submission(name, components, self.folder, **given))

    def submit_job(self, job: Submission) -> HetJob:
        """`submit_het` of what is described already."""
        job.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        pickles = {part.name: self._pickle(part) for part in job.components if part.function is not None}
        try:
            self._throttle()
            self._last_job_submitted = time.time()
            text = submission(job)
            number = sbatch(text, self.environment)
        except BaseException:
            for path in pickles.values():
                path.unlink()
            raise
        (job.folder / f"{number}_submission.sh").write_text(text)
        tasks = {part.name: part.tasks for part in job.components}
        (job.folder / f"{number}.json").write_text(json.dumps({"heterogeneous": job.groups, "components": tasks}))
        submitted = HetJob.load(job.folder, number)
        for part in job.components:
            if part.batch_host:
                submitted[part.name].paths.stdout.symlink_to(os.path.relpath(job.log, job.folder / part.name))
        for name, path in pickles.items():
            submitted[name].paths.move_temporary_file(path, "submitted_pickle")
        return submitted

    def _pickle(self, part: Component) -> Path:
        folder = self.folder / part.name
        folder.mkdir(exist_ok=True, mode=0o700)
        assert part.function is not None
        delayed = utils.DelayedSubmission(part.function, *part.args, **part.kwargs)
        delayed.set_timeout(part.time_min, self.max_num_timeout)
        path = folder / f"{uuid.uuid4().hex}.pkl"
        delayed.dump(path)
        return path

    # -- what submitit's own interface needs: jobs of one component

    def _internal_process_submissions(self, delayed_submissions: list[utils.DelayedSubmission]) -> list[Job[Any]]:
        given = dict(self.parameters)
        name = given.pop("job_name", "submitit")
        jobs: list[Job[Any]] = []
        for delayed in delayed_submissions:
            part = Component(_ALONE, delayed.function, delayed.args, delayed.kwargs, **given)
            jobs.append(self.submit_het(part, name=name)[_ALONE])
        return jobs

    @classmethod
    def _equivalence_dict(cls) -> EquivalenceDict:
        return {
            "name": "job_name",
            "timeout_min": "time_min",
            "mem_gb": "memory",
            "nodes": "nodes",
            "cpus_per_task": "cpus_per_task",
            "gpus_per_node": "gpus_per_node",
            "tasks_per_node": "tasks_per_node",
        }

    @classmethod
    def _valid_parameters(cls) -> set[str]:
        return {"job_name", *(f.name for f in fields(Component))} - {
            "name",
            "function",
            "args",
            "kwargs",
            "batch_host",
            "lives",
        }

    def _convert_parameters(self, params: dict[str, Any]) -> dict[str, Any]:
        names: dict[str, Any] = dict(self._equivalence_dict())
        converted: dict[str, Any] = {names.get(key, key): value for key, value in params.items()}
        if "mem_gb" in params:
            converted["memory"] = f"{round(params['mem_gb'] * 1024)}M"
        return converted

    def _internal_update_parameters(self, **kwargs: Any) -> None:
        if wrong := sorted(set(kwargs) - self._valid_parameters()):
            raise ValueError(
                f"no option of a component: {', '.join(wrong)}; expected {', '.join(sorted(self._valid_parameters()))}"
            )
        self.parameters.update(kwargs)
