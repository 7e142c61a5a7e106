"""The table of machines (hardware.yaml), and one's own. Free of torch."""

from __future__ import annotations

import difflib
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from prl.config.named import SetupError

Positive = Annotated[float, Field(gt=0)]
Share = Annotated[float, Field(gt=0, le=1)]


class HardwareError(SetupError):
    """A machine that the table does not have, or a file that is none."""


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Flops(_Strict):
    float32: Positive
    bf16: Positive
    fp8: Positive


class Achieved(_Strict):
    """Shares of the peaks that real programs reach."""

    float32: Share
    bf16: Share
    fp8: Share
    attention: Share
    """Of bf16's."""
    memory: Share
    link: Share
    network: Share
    host: Share
    pcie: Share
    usable: Share
    host_usable: Share


PEAK = Achieved(**dict.fromkeys(Achieved.model_fields, 1.0))


class Hardware(_Strict):
    """One GPU (one process on a CPU) and its share of a node; the units are those of hardware.yaml."""

    name: str = ""
    kind: Literal["cpu", "cuda"]
    flops: Flops
    memory_bytes: Positive
    memory_bytes_per_s: Positive
    link_bytes_per_s: Positive
    network_bytes_per_s: Positive
    gpus_per_node: Annotated[int, Field(gt=0)]
    host_bytes: Positive
    host_bytes_per_s: Positive
    pcie_bytes_per_s: Positive
    achieved: Achieved
    latency_s: Positive

    @property
    def usable(self) -> float:
        """Bytes of a GPU."""
        return self.memory_bytes * self.achieved.usable

    @property
    def host_usable(self) -> float:
        """Bytes of a GPU's share of its node."""
        return self.host_bytes * self.achieved.host_usable / self.gpus_per_node


@cache
def table() -> dict[str, Hardware]:
    raw = yaml.safe_load(resources.files("prl.plan").joinpath("hardware.yaml").read_text("utf-8"))
    return {name: Hardware.model_validate(entry | {"name": name}) for name, entry in raw.items()}


def find(name: str) -> Hardware:
    """A machine of the table, or of a YAML file of one entry's keys; HardwareError says what there is."""
    known = table()
    if name in known:
        return known[name]
    path = Path(name)
    if not path.is_file():
        near = difflib.get_close_matches(name.upper(), known, 1, 0.5)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise HardwareError(f"--hardware {name}: neither a file nor one of {', '.join(known)}{hint}")
    try:
        raw: Any = yaml.safe_load(path.read_text("utf-8"))
        return Hardware.model_validate({"name": path.stem} | raw)
    except (yaml.YAMLError, UnicodeDecodeError, TypeError) as e:
        raise HardwareError(f"--hardware {name}: not a YAML mapping of a machine's figures: {e}") from None
    except ValidationError as e:
        found = "; ".join(f"{'.'.join(map(str, x['loc']))}: {x['msg']}" for x in e.errors(include_url=False))
        raise HardwareError(f"--hardware {name}: {found}") from None
