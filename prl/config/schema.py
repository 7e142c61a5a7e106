"""The schema of a run. Strict: an unknown key or a wrong type is an error that names its path.

Importing this module does not import torch. Rules that span fields live in `prl.config.rules`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

PositiveInt = Annotated[int, Field(gt=0)]
NonNegativeInt = Annotated[int, Field(ge=0)]
PositiveFloat = Annotated[float, Field(gt=0)]
NonNegativeFloat = Annotated[float, Field(ge=0)]
Fraction = Annotated[float, Field(ge=0, le=1)]
Beta = Annotated[float, Field(ge=0, lt=1)]
DType = Literal["float32", "bfloat16", "float64"]
Precision = Literal["bf16", "fp8"]
RecomputeTarget = Literal["norm", "attn_proj", "mla_up_proj", "mlp", "routed_experts"]


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True)


class Run(Section):
    name: str = "run"
    """Folder of the run below `dir`."""
    dir: Path = Field(default=Path("outputs"), validate_default=False)
    seed: int = 0
    deterministic: bool = False
    """Synchronous lock-step mode: every batch follows from the seed alone, bit for bit."""
    bitwise: bool = False
    """Trainer and engine give a token of the trainer's own version the same logprob, to the last bit (embedded engine, CPU)."""


INDEXER = r".*\.indexer\..*"
"""Frozen by default, in models that have one: it learns nothing from the policy's loss."""


class Model(Section):
    path: Path | None = None
    """Hugging Face folder (config.json, safetensors, tokenizer.json) to start from."""
    architecture: dict[str, Any] | None = None
    """A config.json written inline; weights are then drawn from the seed."""
    dtype: DType = "float32"
    """Type of the trainer's forward and backward; masters and optimizer are at least float32."""
    frozen: list[str] = [INDEXER]
    """Regular expressions over full parameter names (fullmatch) that get no gradient."""


class Tokenizer(Section):
    path: Path | None = None
    """tokenizer.json or a folder with one; default: the model's folder."""
    characters: str | None = None
    """One token a character of this alphabet, instead of a file."""
    vocab_size: PositiveInt | None = None
    """Pad the character vocabulary to this size with tokens that no text has; training makes them unlikely."""


class Env(Section):
    name: str
    kind: str
    """Registered environment: reasoning_gym, calculator, python, … or `package.module:Class`."""
    weight: PositiveFloat = 1.0
    options: dict[str, Any] = {}
    timeout_s: PositiveFloat = 60.0
    """Deadline of one rollout's environment work, generation excluded."""
    sandbox: Literal["namespaces", "none"] = "namespaces"
    retries: NonNegativeInt = 1
    """Attempts after an environment error before the rollout counts as failed."""


class Sampling(Section):
    temperature: NonNegativeFloat = 1.0
    max_tokens: PositiveInt = 64
    """Completion tokens per turn."""
    max_turns: PositiveInt = 1
    max_length: PositiveInt = 512
    """Tokens of one sample, prompt included; longer ones are cut and counted."""
    top_p: Fraction = 1.0
    top_k: NonNegativeInt = 0
    """0 is off. Training rollouts must leave top_p and top_k off; the section evaluation has its own."""


class Advantage(Section):
    kind: str = "grpo"
    """grpo, grpo_std, rloo, dr_grpo, max_rl, or `package.module:function`."""
    length_penalty: NonNegativeFloat = 0.0


class Orchestrator(Section):
    batch_size: PositiveInt = 64
    """Rollouts per optimizer step; a multiple of group_size."""
    group_size: PositiveInt = 8
    synchronous: bool = False
    """Generate batch n only when the weights of step n - 1 are applied."""
    max_staleness: NonNegativeInt = 2
    stale: Literal["drop", "mask"] = "drop"
    """A rollout over max_staleness is dropped, or only its old tokens are masked."""
    max_in_flight: PositiveInt = 256
    """Rollouts generating at once over all replicas."""
    max_refills: NonNegativeInt = 20
    """Groups replaced per batch (filtered, failed, stale), in multiples of its groups, before the run saves and exits 75."""
    when_learned: Literal["stop", "save"] = "save"
    """What exhausted refills mean when every group was solved: `stop` ends the run normally."""
    max_failed_fraction: Fraction = 0.5
    """A group with more failed members than this is dropped; else its survivors form the baseline."""
    queue_bytes: PositiveInt = 1 << 30
    """Bound of finished rollouts waiting for a batch."""
    advantage: Advantage = Advantage()
    shuffle_rewards: bool = False
    """A control: rewards permuted over the batch, which must teach nothing."""
    curriculum: Literal["uniform", "difficulty"] = "uniform"


class Loss(Section):
    kind: str = "dppo"
    """dppo, grpo, gspo, cispo, icepop, tis, or `package.module:function`."""
    normalise: Literal["token", "sequence", "constant"] = "token"
    """Mean over tokens, mean over rollouts of the mean over their tokens, or sum over tokens / (rollouts x constant_tokens)."""
    constant_tokens: PositiveInt = 1024
    options: dict[str, float] = {}


class Optim(Section):
    kind: Literal["adamw", "muon", "sgd"] = "adamw"
    """muon: for matrices and experts; AdamW for embedding, LM head, router, norms and biases."""
    lr: NonNegativeFloat = 1e-4
    adam_lr: PositiveFloat | None = None
    """Of what Muon leaves to AdamW; default: lr. The schedule scales both."""
    betas: tuple[Beta, Beta] = (0.9, 0.95)
    eps: PositiveFloat = 1e-8
    momentum: Beta = 0.95
    """Muon's (Nesterov)."""
    weight_decay: NonNegativeFloat = 0.0
    state_dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of moments and momentum at rest; float64 masters keep float64 for float32."""
    schedule: Literal["constant", "linear", "cosine", "wsd"] = "constant"
    """wsd: warm-up, constant, then down by a line."""
    warmup_steps: NonNegativeInt = 0
    decay_fraction: Fraction = 0.2
    """Part of all steps, the last ones, in which wsd goes down."""
    decay_steps: PositiveInt | None = None
    """The same as a number of steps, instead of decay_fraction."""
    clip: PositiveFloat = 1.0


class Mesh(Section):
    """How the trainer's ranks share the work; see `prl.config.mesh`."""

    replicate: PositiveInt = 1
    """Copies of the sharded model (HSDP)."""
    cp: PositiveInt | Literal["auto"] = "auto"
    """Ranks that share each sequence (context parallelism); auto: the smallest."""
    ep: PositiveInt | Literal["auto"] = "auto"
    """Ranks that share the experts (expert parallelism); auto: the most that divide experts and ranks."""
    dispatcher: Literal["all_to_all", "deepep"] = "all_to_all"
    """How tokens reach their experts' ranks: by the process group, or by DeepEP's kernels (CUDA, the module deep_ep)."""
    dispatch_chunks: PositiveInt = 1
    """Parts of a micro-batch's tokens: one is on its way while the experts compute on another."""
    fp8_dispatch: bool = False
    """Tokens travel as FP8 codes and scales; needs precision fp8."""


class Lora(Section):
    """Train low-rank adapters instead of the weights."""

    rank: PositiveInt = 16
    alpha: PositiveFloat = 32.0
    """A weight is W + (alpha / rank) · B · A."""
    targets: list[str] = [r"model\.layers\..*"]
    """Regular expressions over names (fullmatch) of linear layers (`….q_proj`) and experts' stacks (`….experts.down_proj`)."""


class Trainer(Section):
    ranks: PositiveInt = 1
    mesh: Mesh = Mesh()
    precision: Precision = "bf16"
    """What `fp8_layers` compute in: `model.dtype` (bf16), or block-scaled FP8."""
    fp8_layers: list[str] = [".*"]
    """Names or regular expressions (fullmatch) of layers, such as `model.layers.3.mlp.experts`; default: all that can be FP8,
    which are routed experts and linear layers whose widths are multiples of 128."""
    steps: PositiveInt = 100
    pack_tokens: PositiveInt = 8192
    """Token budget of one micro-batch."""
    loss: Loss = Loss()
    optim: Optim = Optim()
    offload: Literal["none", "optimizer", "parameters"] = "none"
    """What lives on the host: the optimizer's state (the update runs there), or the masters too."""
    lora: Lora | None = None
    router_replay: bool = True
    replay_selections: bool = False
    """Replay the indexer's recorded selections too (debugging)."""
    bias_update: NonNegativeFloat = 0.0
    """Step of the router's correction bias per optimizer step; 0 leaves it alone."""
    lm_head_chunk: PositiveInt = 4096
    """Tokens per chunk of the LM head."""
    recompute: Literal["none", "full", "selective"] = "none"
    """What backward computes again instead of keeping: nothing, whole blocks (less memory, a third more work), or parts."""
    recompute_targets: list[RecomputeTarget] = ["norm", "mla_up_proj", "mlp", "routed_experts"]
    """The parts of each block that `selective` means. `attn_proj`: the projections before attention, QK-norm and rotation."""
    offload_activations: NonNegativeInt = 0
    """What backward needs waits in host memory; so many blocks at most are on their way. 0: it stays on the device."""
    compile: bool = False
    """torch.compile each block."""
    keep_gathered: list[str] = []
    """Regular expressions over names of sharded modules (`model.layers.0`, `….mlp.experts`, `rest`; fullmatch) whose weights
    stay whole on every rank from forward to backward: fewer gathers, more memory."""
    max_nonfinite: NonNegativeInt = 3
    """Steps skipped for a non-finite loss or gradient before the run stops."""


class Vllm(Section):
    """What only vLLM has (docs/inference.md)."""

    tensor_parallel: PositiveInt = 1
    """Workers that share each layer of a replica."""
    eager: bool = False
    """No torch.compile and no CUDA graphs: starts sooner, runs slower on a GPU."""


class Inference(Section):
    engine: Literal["embedded", "vllm"] = "embedded"
    vllm: Vllm = Vllm()
    replicas: PositiveInt = 1
    dtype: DType = "float32"
    precision: Precision = "bf16"
    """What `fp8_layers` compute in: `dtype` (bf16), or block-scaled FP8."""
    fp8_layers: list[str] | None = None
    """As trainer.fp8_layers, which is the default."""
    max_batch: PositiveInt = 128
    """Sequences decoded together."""
    max_prefill_tokens: PositiveInt = 2048
    """Prompt tokens of one engine step (chunked prefill)."""
    kv_tokens: PositiveInt = 65536
    """Tokens that the KV cache holds."""
    prefix_cache: bool = True
    stream_interval: PositiveInt = 32
    """Tokens per streamed chunk."""
    record_routes: bool = True
    record_selections: bool = False
    selection_bytes: PositiveInt = 1 << 28
    """Cap of recorded selections per request."""


class Evaluation(Section):
    tasks: PositiveInt = 512
    """Held-out tasks, never trained on."""
    every: PositiveInt = 25
    """Optimizer steps between evaluations in the run."""
    tasks_in_run: PositiveInt = 128
    """Tasks of an evaluation between the first and the last."""
    greedy: bool = True
    """Answer each task greedily too."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    top_k: NonNegativeInt = 0
    """Truncate the sampled answers' distribution; 1 and 0 are off."""
    timeout_s: PositiveFloat = 120.0
    """Deadline; an evaluation cut by it is marked incomplete and not reported."""


class ChatSource(Section):
    path: Path
    """JSONL, a conversation a line: {"messages": [{"role": …, "content": …}, …]}."""
    weight: PositiveFloat = 1.0


class Sft(Section):
    steps: PositiveInt = 200
    batch_size: PositiveInt = 128
    """Examples, or conversations, per optimizer step."""
    examples: PositiveInt = 4096
    """Worked answers of the environments; they are repeated in a new order each epoch."""
    data: list[ChatSource] = []
    """Conversations to train on instead of worked answers, mixed by weight."""
    roles: list[str] = ["assistant"]
    """Whose messages are trained; the others are context."""
    max_length: PositiveInt | None = None
    """Tokens of one sample of a conversation; default: trainer.pack_tokens."""
    too_long: Literal["drop", "cut"] = "drop"
    """What happens to longer ones; counted either way."""
    validation: list[ChatSource] = []
    """Conversations never trained on, whose loss is measured every `validate_every` steps and at the end."""
    validate_every: PositiveInt = 100
    validation_examples: PositiveInt = 512
    """Conversations measured at most, in the files' order."""
    optim: Optim = Optim(lr=3e-4)
    stop_at: Fraction | None = None
    """Stop early when the greedy solve rate on `dev_tasks` reaches this."""
    dev_tasks: PositiveInt = 128
    dev_every: PositiveInt = 25


class Control(Section):
    """More SFT on the same worked answers for as long as the RL phase took."""

    time_fraction: Fraction = 1.0


class Checkpoint(Section):
    every: PositiveInt = 50
    """Optimizer steps between checkpoints."""
    keep: PositiveInt = 2
    """The newest that stay."""
    keep_every: NonNegativeInt = 0
    """Those of steps that are multiples of it stay too, for good; 0 is none."""
    asynchronous: bool = True
    """Steps go on while one is written, from a copy in host memory; false: they wait, and no copy is made."""


class Transport(Section):
    weights: Literal["filesystem", "shared_memory"] = "shared_memory"
    keep_versions: Annotated[int, Field(ge=2)] = 3
    poll_s: PositiveFloat = 0.02


class Component(Section):
    """The nodes that one component of a Slurm job asks for."""

    nodes: PositiveInt = 1
    partition: str | None = None
    gpus_per_node: NonNegativeInt = 0
    cpus_per_node: PositiveInt | None = None
    """Default: what the partition gives; with `exclusive` all."""
    memory: str = "0"
    """Of each node, as `--mem` takes it; 0 is all of it."""


class Slurm(Section):
    """How a run is submitted; what belongs to the cluster and not to the run stands in a site file (configs/site)."""

    trainer: Component = Component()
    """Ranks and orchestrator."""
    inference: Component = Component()
    heterogeneous: bool = True
    """One component each; false, where a cluster forbids it: one homogeneous job whose list of nodes is split."""
    exclusive: bool = True
    """Whole nodes, shared with nobody."""
    time_min: PositiveInt = 60
    tries: PositiveInt = 5
    """Failures after which the job is not run again; two in the same way at the same step end it too."""
    warn_s: PositiveInt = 120
    """How long before the time limit the run is asked to save."""
    at_limit: Literal["requeue", "end"] = "requeue"
    """What becomes of a run that has saved for its time limit, or because Slurm warned it of preemption in the same way."""
    account: str | None = None
    qos: str | None = None
    reservation: str | None = None
    constraint: str | None = None
    setup: list[str] = []
    """Lines of shell before anything is run on a batch host (`module load …`)."""


class Launch(Section):
    kernels: Literal["cuda", "triton", "cpu", "reference"] | None = None
    """Backend that every kernel must have; default: the best that each has here."""
    threads: dict[Literal["trainer", "orchestrator", "inference"], PositiveInt] = {}
    """Threads per process of a role; default: cores divided by the role processes, at least one."""
    pass_env: list[str] = []
    """Environment variables that roles get beside the known ones (tokens and passwords are not passed on)."""
    start_timeout_s: PositiveFloat = 120.0
    wait_timeout_s: PositiveFloat = 600.0
    """Deadline of every wait of one role for another in a running run."""
    stop_timeout_s: PositiveFloat = 8.0
    """From the request to end until the roles are killed."""
    save_timeout_s: PositiveFloat | None = None
    """From the request to stop until the trainer is killed though it has not saved: its step goes on to its end, then a
    checkpoint is written. Default: as stop_timeout_s; as a Slurm job, what its warning leaves (slurm.warn_s) less 10 s.
    """
    heartbeat_timeout_s: PositiveFloat = 60.0
    replica_heartbeat_s: PositiveFloat = 15.0
    """As heartbeat_timeout_s, for inference replicas."""
    replica_restarts: NonNegativeInt = 5
    """Of each inference replica, while another one serves; then, or in deterministic mode, its loss is a failure of the run."""
    slurm: Slurm | None = None

    @property
    def save_s(self) -> float:
        """save_timeout_s or its default."""
        if self.save_timeout_s is not None:
            return self.save_timeout_s
        return max(self.stop_timeout_s, self.slurm.warn_s - 10.0) if self.slurm else self.stop_timeout_s


class Monitor(Section):
    console: Literal["auto", "live", "plain", "off"] = "auto"
    samples: NonNegativeInt = 8
    """Rollouts kept verbatim per step for the report."""
    drift: Literal["warn", "stop"] = "warn"
    """What the alarm does when trainer and engine leave the band of their types (docs/fidelity.md)."""


class RunConfig(Section):
    run: Run = Run()
    model: Model = Model()
    tokenizer: Tokenizer = Tokenizer()
    envs: list[Env] = []
    sampling: Sampling = Sampling()
    orchestrator: Orchestrator = Orchestrator()
    trainer: Trainer = Trainer()
    inference: Inference = Inference()
    evaluation: Evaluation = Evaluation()
    sft: Sft | None = None
    control: Control | None = None
    checkpoint: Checkpoint = Checkpoint()
    transport: Transport = Transport()
    launch: Launch = Launch()
    monitor: Monitor = Monitor()
