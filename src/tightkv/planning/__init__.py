"""How much memory there is, and what it holds: blocks, tokens, requests."""

from tightkv.planning.arithmetic import FormatChoice
from tightkv.planning.capacity import plan_capacity
from tightkv.planning.capacity_plan import (
    CapacityPlan,
    Decode,
    FormatPlan,
    LayerKind,
    Message,
    ModelSummary,
    Needed,
    PlanSettings,
    Range,
    Term,
)
from tightkv.planning.footprint import Footprint
from tightkv.planning.hardware import HOSTS, Hardware, find_hardware, known_hardware
from tightkv.planning.memory import (
    MemoryPlan,
    PoolRequest,
    available_memory,
    check_max_model_len,
    installed_memory,
    plan_memory,
)
from tightkv.planning.model_facts import LatentCache, ModelFacts, Parameter
from tightkv.planning.report import Section, as_markdown, report
from tightkv.planning.sharding import check_heads
from tightkv.planning.texts import LANGUAGES, Texts
from tightkv.planning.units import format_bytes, parse_length, parse_size

__all__ = [
    "HOSTS",
    "LANGUAGES",
    "CapacityPlan",
    "Decode",
    "Footprint",
    "FormatChoice",
    "FormatPlan",
    "Hardware",
    "LatentCache",
    "LayerKind",
    "MemoryPlan",
    "Message",
    "ModelFacts",
    "ModelSummary",
    "Needed",
    "Parameter",
    "PlanSettings",
    "PoolRequest",
    "Range",
    "Section",
    "Term",
    "Texts",
    "as_markdown",
    "available_memory",
    "check_heads",
    "check_max_model_len",
    "find_hardware",
    "format_bytes",
    "installed_memory",
    "known_hardware",
    "parse_length",
    "parse_size",
    "plan_capacity",
    "plan_memory",
    "report",
]
