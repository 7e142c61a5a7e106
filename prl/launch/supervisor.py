"""What happens when: `transition` is a pure function from state and event to state and actions; `supervise` drives it.

A run is a list of stages (sft, rl, control, evaluate). A stage has primaries, whose end is the stage's end, and services, which
serve them and are told to end afterwards. A service that is lost (ended, silent) while another one serves is started again, a
bounded number of times; every other loss is a failure. Phases:

    starting   every role was started; until each has left its own start-up       bounded by start_timeout_s
    running    all roles live and show it                                          each by its heartbeat, a restarted
                                                                                   service by start_timeout_s first
    draining   a primary has ended; the others end too                             by wait_timeout_s, and heartbeats
    closing    the primaries have ended; services were told to end                 by stop_timeout_s, then killed
    saving     a stop was requested: primaries save, then services end             by save_timeout_s, then by
                                                                                   stop_timeout_s; then killed
    done       nothing runs; `code` 0 or 75
    failed     nothing runs; `code` 1 or 2, `cause` is the first thing that went wrong
"""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from prl.launch.guests import Guests
from prl.launch.local import GONE, Executor, RoleSpec
from prl.monitor.status import node_name
from prl.transport.run_dir import RunDir

DONE, CONFIG, SAVED, FAILED = 0, 2, 75, 1

Phase = Literal["starting", "running", "draining", "closing", "saving", "done", "failed"]


@dataclass(frozen=True)
class Stage:
    name: str
    primaries: frozenset[str]
    services: frozenset[str] = frozenset()

    @property
    def roles(self) -> frozenset[str]:
        return self.primaries | self.services


@dataclass(frozen=True)
class Limits:
    """Seconds; see the module's table."""

    start_s: float
    wait_s: float
    stop_s: float
    save_s: float
    heartbeat_s: float
    service_s: float
    """As heartbeat_s, for services."""
    restarts: int
    """Of each service; 0: the loss of one is a failure."""


@dataclass(frozen=True)
class State:
    """`stages[0]` is the current one. `beats` holds when each living role last showed life; `since` when the phase began."""

    stages: tuple[Stage, ...]
    limits: Limits
    phase: Phase = "starting"
    since: float = 0.0
    alive: frozenset[str] = frozenset()
    started: frozenset[str] = frozenset()
    beats: Mapping[str, float] = field(default_factory=dict)
    restarts: Mapping[str, int] = field(default_factory=dict)
    code: int = DONE
    cause: str = ""
    culprit: str = ""
    """The role whose log tells more about the cause."""
    last_words: tuple[str, ...] = ()
    """The end of that log."""

    @property
    def over(self) -> bool:
        return self.phase in ("done", "failed")

    def deadline(self) -> float:
        """When the current wait ends at the latest. Every state that is not over has one."""
        hung = min(map(self.silent_until, self.alive), default=self.since + self.limits.heartbeat_s)
        match self.phase:
            case "starting":
                return self.since + self.limits.start_s
            case "running":
                return hung
            case "draining":
                return min(hung, self.since + self.limits.wait_s)
            case "saving" if self.alive & self.stages[0].primaries:
                return self.since + self.limits.save_s
            case _:
                return self.since + self.limits.stop_s

    def waits_for(self) -> str:
        """What has to happen for the phase to end, in words; empty while all goes its way."""
        primaries = self.stages[0].primaries if self.stages else frozenset()
        match self.phase:
            case "starting" | "running" if late := sorted(self.alive - self.started):
                return f"{', '.join(late)} to start (at most {self.limits.start_s:g} s)"
            case "draining":
                return f"{', '.join(sorted(self.alive & primaries))} to end (at most {self.limits.wait_s:g} s)"
            case "saving" if late := sorted(self.alive & primaries):
                return f"{', '.join(late)} to save and end (at most {self.limits.save_s:g} s)"
            case "closing" | "saving":
                return f"{', '.join(sorted(self.alive))} to end (at most {self.limits.stop_s:g} s)"
            case _:
                return ""

    def silent_until(self, role: str) -> float:
        """When a living role that shows no life until then is taken for lost."""
        if role not in self.started:
            return self.beats[role] + self.limits.start_s
        return self.beats[role] + (self.limits.service_s if role in self.stages[0].services else self.limits.heartbeat_s)


# Events. `now` is a monotonic time in seconds.


@dataclass(frozen=True)
class Began:
    """The stage's roles were started."""

    now: float


@dataclass(frozen=True)
class Beat:
    """A role's status was renewed; `ready`: it has left its start-up."""

    role: str
    ready: bool
    now: float


@dataclass(frozen=True)
class Exited:
    role: str
    code: int
    now: float


@dataclass(frozen=True)
class StopRequested:
    """Ctrl-C or SIGTERM; the second one in a run kills."""

    now: float


@dataclass(frozen=True)
class Tick:
    """`stuck`: what is known of roles that will show no life, though others that wait for them may fall silent first."""

    now: float
    stuck: Mapping[str, str] = field(default_factory=dict)


Event = Began | Beat | Exited | StopRequested | Tick


# Actions, in the order given.


@dataclass(frozen=True)
class Start:
    stage: Stage


@dataclass(frozen=True)
class Restart:
    """End what is left of a service and start it again."""

    role: str
    why: str


@dataclass(frozen=True)
class Terminate:
    """Send SIGTERM: save if you can, and end."""

    roles: frozenset[str]


@dataclass(frozen=True)
class Kill:
    """End every process of the run now."""


@dataclass(frozen=True)
class StageDone:
    stage: Stage


Action = Start | Restart | Terminate | Kill | StageDone


def begin(stages: tuple[Stage, ...], limits: Limits, now: float) -> tuple[State, list[Action]]:
    """The first state of a run; without stages it is done."""
    if not stages:
        return State((), limits, phase="done"), []
    return _enter(State(stages, limits), now), [Start(stages[0])]


def transition(state: State, event: Event) -> tuple[State, list[Action]]:
    """The next state and what to do. Events of roles that are not alive, and any event once the run is over, change nothing."""
    if state.over:
        return state, []
    match event:
        case Began(now) if state.phase == "starting":
            return replace(state, since=now, beats=dict.fromkeys(state.alive, now)), []
        case Beat(role, ready, now) if role in state.alive:
            if ready or role in state.started:
                state = replace(state, beats={**state.beats, role: now}, started=state.started | {role})
            if state.phase == "starting" and state.started >= state.alive:
                state = _phase(replace(state, beats=dict.fromkeys(state.alive, now)), "running", now)
            return state, []
        case Exited(role, code, now):
            return _exited(state, role, code, now)
        case StopRequested(now):
            if state.phase == "saving":
                return _saved(state, now, "stopped at once by a second request; what was not saved is lost"), [Kill()]
            primaries = state.stages[0].primaries & state.alive
            state = replace(_phase(state, "saving", now), cause="stop requested")
            return state, [Terminate(primaries or state.alive)]
        case Tick(now, stuck) if now > state.deadline():
            return _overdue(state, now, stuck)
    return state, []


def _phase(state: State, phase: Phase, now: float) -> State:
    return replace(state, phase=phase, since=now)


def _enter(state: State, now: float) -> State:
    """The first stage's roles are about to start."""
    roles = state.stages[0].roles
    return replace(
        _phase(state, "starting", now), alive=roles, started=frozenset(), beats=dict.fromkeys(roles, now), code=DONE, cause=""
    )


def _fail(state: State, now: float, culprit: str, what: str, code: int = FAILED) -> tuple[State, list[Action]]:
    cause = f"stage {state.stages[0].name}: {culprit} {what}"
    return replace(_phase(state, "failed", now), alive=frozenset(), code=code, cause=cause, culprit=culprit), [Kill()]


def _lost(state: State, now: float, role: str, what: str, code: int = FAILED) -> tuple[State, list[Action]]:
    """A role is no use any more though it is needed."""
    services = state.stages[0].services
    tried = state.restarts.get(role, 0)
    if (
        role not in services
        or not (services & state.started & state.alive) - {role}
        or tried >= state.limits.restarts
        or state.phase not in ("starting", "running", "draining")
        or code == CONFIG
    ):
        return _fail(state, now, role, what, code)
    state = replace(state, started=state.started - {role}, restarts={**state.restarts, role: tried + 1})
    return replace(state, beats={**state.beats, role: now}), [Restart(role, what)]


def _saved(state: State, now: float, cause: str) -> State:
    return replace(_phase(state, "done", now), alive=frozenset(), code=SAVED, cause=cause)


def _exited(state: State, role: str, code: int, now: float) -> tuple[State, list[Action]]:
    stage = state.stages[0]
    if role not in stage.roles:
        return _fail(state, now, role, _how(code))
    if role not in state.alive:
        return state, []
    primary, leaving = role in stage.primaries, state.phase in ("closing", "saving")
    if code == -signal.SIGTERM and (state.phase == "saving" or state.code == SAVED):
        code = SAVED  # asked to end before it could listen: it had nothing to save yet
    if code not in (DONE, SAVED) and not (leaving and not primary):
        return _lost(state, now, role, _how(code), CONFIG if code == CONFIG else FAILED)
    if not primary and not leaving:
        return _lost(state, now, role, f"{_how(code)} while it was needed")
    state = replace(state, alive=state.alive - {role}, code=max(state.code, code) if primary else state.code)
    if primary and code == SAVED and not state.cause:
        state = replace(state, cause=f"{role} saved the run")
    if not state.alive:
        return _stage_over(state, now)
    if not state.alive & stage.primaries and primary:
        return _phase(state, "saving" if leaving else "closing", now), [Terminate(state.alive)]
    rest = [Terminate(state.alive & stage.primaries)] if code == SAVED and not leaving else []
    return (state if leaving or state.phase == "draining" else _phase(state, "draining", now)), [*rest]


def _stage_over(state: State, now: float) -> tuple[State, list[Action]]:
    """No role is alive and none failed. A stop that came as the stage was ending anyway ends the run before the next one."""
    stopping = state.phase == "saving"
    if state.code == SAVED:
        return _saved(state, now, state.cause), [Kill()]
    done: list[Action] = [Kill(), StageDone(state.stages[0])]
    state = replace(state, stages=state.stages[1:])
    if not state.stages:
        return replace(_phase(state, "done", now), cause=""), done
    if stopping:
        return _saved(state, now, state.cause), done
    return _enter(state, now), [*done, Start(state.stages[0])]


def _overdue(state: State, now: float, stuck: Mapping[str, str]) -> tuple[State, list[Action]]:
    stage, limits = state.stages[0], state.limits
    match state.phase:
        case "starting":
            late = min(state.alive - state.started)
            return _fail(state, now, late, f"did not start within {limits.start_s:g} s (launch.start_timeout_s)")
        case "closing":
            return _stage_over(replace(state, alive=frozenset()), now)
        case "saving":
            if late := ", ".join(sorted(state.alive & stage.primaries)):
                return _saved(state, now, f"{late} did not save within {limits.save_s:g} s (launch.save_timeout_s)"), [Kill()]
            return _stage_over(replace(state, alive=frozenset()), now)
    hung = min(sorted(state.alive), key=state.silent_until)
    if now > state.silent_until(hung):
        silent = now - state.beats[hung]
        if causes := sorted(state.alive & stuck.keys()):
            return _lost(state, now, causes[0], stuck[causes[0]])
        if hung not in state.started:
            return _lost(state, now, hung, f"did not start within {limits.start_s:g} s (launch.start_timeout_s)")
        setting = "replica_heartbeat_s" if hung in stage.services else "heartbeat_timeout_s"
        return _lost(state, now, hung, f"hangs: no sign of life for {silent:.1f} s (launch.{setting})")
    late = min(state.alive & stage.primaries)
    return _fail(state, now, late, f"did not end within {limits.wait_s:g} s after the others (launch.wait_timeout_s)")


def _how(code: int) -> str:
    if code >= 0:
        return f"ended with exit code {code}"
    if code == GONE:
        return "is gone without a word, as with its node"
    hint = " (out of memory?)" if code == -signal.SIGKILL else ""
    return f"was killed by {signal.Signals(-code).name}{hint}"


POLL_S = 0.05
BEATS_S = 0.5
RECORD_S = 2.0
"""How often the time of the running stage is recorded: what a kill -9 of this process can lose."""
TAIL_LINES = 20
TELL_S = 2.0
"""How often supervisor.json is renewed though nothing has changed."""
LOST_KEPT = 8
"""Lost roles whose last words are kept there, over all lives of the run."""
FIRST_CAUSE_S = 0.5
"""After a role failed, how long others are given to fail too, so that the first cause can be told from what followed."""


class Supervisor:
    """Drives `transition` for one run: starts roles, watches exits, heartbeats and stop requests, and acts.

    `specs` gives a stage's processes, `stops` how often a stop was requested so far, `say` tells the user a line.
    """

    def __init__(
        self,
        run: RunDir,
        executor: Executor,
        limits: Limits,
        specs: Callable[[Stage], Sequence[RoleSpec]],
        *,
        stops: Callable[[], int],
        say: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ):
        self.run, self.executor, self.limits, self.specs = run, executor, limits, specs
        self.stops, self.say, self.clock = stops, say, clock
        self._stops = 0
        self._since = clock()  # the stage's time up to here is recorded
        self._next_look = 0.0
        self._seen: dict[str, float] = {}  # role to the time written in its status file
        self._guests = Guests(run, limits.service_s, say)
        self._told: tuple[object, ...] = ()
        self._tell_at = 0.0
        self._phase_since = time.time()
        self._lost: list[dict[str, Any]] = (run.read_supervisor() or {}).get("lost", [])

    def supervise(self, stages: tuple[Stage, ...]) -> State:
        """Run the stages to the end and return the last state; nothing of the run is running then.

        The time of each stage and whether it is done go to the run's stages.json. OSError where a role cannot be started.
        """
        state, actions = begin(stages, self.limits, self.clock())
        try:
            while True:
                for action in actions:
                    self._do(action)
                    if isinstance(action, Start):
                        state, _ = transition(state, Began(self.clock()))
                self._tell(state)
                if state.over:
                    break
                time.sleep(POLL_S)
                if self.clock() > self._since + RECORD_S:
                    with suppress(OSError):  # a full disk: the next time tells it too
                        self._record(state.stages[0], done=False)
                actions = []
                for event in self._events(state):
                    state, more = transition(state, event)
                    actions += more
        finally:
            self._guests.close()
            self.executor.kill()
        if state.culprit:
            state = replace(state, last_words=tuple(self.executor.log_tail(state.culprit, TAIL_LINES)))
            self._remember(state.culprit, state.cause, state.last_words)
            self._tell_at = 0.0
        self._tell(state)
        if state.stages:
            try:
                self._record(state.stages[0], done=False)
            except OSError as e:  # a full disk: the state says what went wrong first
                self.say(f"the time of stage {state.stages[0].name} is not recorded: {e}")
        return state

    def _do(self, action: Action) -> None:
        match action:
            case Start(stage):
                self._stage = stage
                self._since = self.clock()
                self._seen.clear()
                self.run.forget_roles()
                self.executor.start(self.specs(stage))
            case Restart(role, why):
                self.say(f"{role} {why}: it is started again, the run goes on with the others")
                self.run.metrics("supervisor").log("event", name="restart", of=role, why=why)
                self._remember(role, f"{why}: it was started again", self.executor.log_tail(role, TAIL_LINES))
                self.executor.end([role])
                self.run.forget_roles([role])
                self._seen.pop(role, None)
                self.executor.start([spec for spec in self.specs(self._stage) if spec.name == role])
            case Terminate(roles):
                self.executor.signal(sorted(roles), signal.SIGTERM)
            case Kill():
                for left in self.executor.kill():
                    self.say(f"{left} could not be ended")
            case StageDone(stage):
                self._record(stage, done=True)

    def _remember(self, role: str, why: str, lines: Sequence[str]) -> None:
        self._lost = [*self._lost, {"t": time.time(), "role": role, "why": why, "lines": list(lines)}][-LOST_KEPT:]

    def _tell(self, state: State) -> None:
        """Say in the run's supervisor.json how it stands: as that changes, and to show life."""
        now, told = self.clock(), (state.stages[:1], state.phase, state.alive, state.started, state.restarts)
        if told == self._told and now < self._tell_at:
            return
        if told[:2] != self._told[:2]:
            self._phase_since = time.time()
        self._told, self._tell_at = told, now + TELL_S
        with suppress(OSError):  # a full disk: the next time tells it too
            self.run.record_supervisor(
                t=time.time(),
                host=node_name(),
                stage=state.stages[0].name if state.stages else "",
                phase=state.phase,
                since=self._phase_since,
                waits_for=state.waits_for(),
                roles=sorted(state.alive),
                code=state.code,
                cause=state.cause,
                lost=self._lost,
            )

    def _record(self, stage: Stage, *, done: bool) -> None:
        """Add the time since the last record to the stage's."""
        now = self.clock()
        self.run.record_stage(stage.name, now - self._since, done=done)
        self._since = now

    def _events(self, state: State) -> list[Event]:
        """What happened since the last call; heartbeats come before the tick that judges them."""
        events: list[Event] = []
        ended, services = self.executor.poll(), state.stages[0].services
        # A service may have ended since all processes were asked to, as Slurm does, and this one hears of it a moment later.
        if any(code not in (DONE, SAVED) or role in services for role, code in ended.items()) and state.phase != "saving":
            until = self.clock() + FIRST_CAUSE_S
            while self.clock() < until or (
                self.clock() < until + self.limits.stop_s and self._failed(state.alive - ended.keys())
            ):
                time.sleep(POLL_S)
                ended |= self.executor.poll()
        if self.stops() > self._stops:
            self._stops += 1
            self.say("stop requested: saving (ask again to end at once)" if self._stops == 1 else "ending at once")
            events.append(StopRequested(self.clock()))
        # Killed roles first, then services: a primary often fails because one of those has. Of ranks the one that failed first.
        failed = self._failed(ended)
        order = sorted(
            ended, key=lambda role: (ended[role] >= 0, role in state.stages[0].primaries, failed.get(role, math.inf), role)
        )
        events += [Exited(role, ended[role], self.clock()) for role in order]
        now = self.clock()
        if now >= self._next_look:
            self._next_look = now + BEATS_S
            for role in state.alive:
                status = self.run.read_status(role)
                if status is not None and status["t"] != self._seen.get(role):
                    self._seen[role] = status["t"]
                    events.append(Beat(role, status["phase"] != "starting", now))
            self._guests.look(state.stages[0].roles, now)
        stuck = {}
        if self.clock() > state.deadline():
            stuck = dict.fromkeys(self._failed(state.alive), "failed, and does not end")
            stuck |= dict.fromkeys(self.executor.stopped(), "hangs: a signal has stopped it (SIGSTOP; SIGCONT lets it go on)")
        return [*events, Tick(self.clock(), stuck)]

    def _failed(self, roles: Iterable[str]) -> dict[str, float]:
        """Role to the time at which it says that it failed; others may have ended before it, for the same reason."""
        told = {role: self.run.read_status(role) or {} for role in roles}
        return {role: status["failed"] for role, status in told.items() if "failed" in status}
