"""docs/architecture/types.md: the classes that one meets first, by what their docstrings say.

python .ci/type_docs.py            # rewrites the page
python .ci/type_docs.py --check    # exit code 1 if it would
"""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "architecture" / "types.md"
HEAD = """# The types

The classes that one meets first, by room, and what their docstrings say. `.ci/type_docs.py` makes
this page. [architecture.md](../architecture.md) is the overview.
"""
#: Title -> folders and the names of classes there; ``file.Name`` where several have a name.
ROOMS: dict[str, tuple[tuple[str, ...], str]] = {
    "The facade": (
        ("sdk",),
        "LLM AsyncLLM LLMTokenizer EngineConfig EngineOptions SamplingParams "
        "StructuredOutputsParams SpeculativeConfig Logprobs Timeline RequestEvent "
        "SchedulingPolicy MemoryPool Lease",
    ),
    "From a call to the engine, and back": (
        ("sdk/requests", "sdk/engine"),
        "Job Answer JobAnswers JobMaker JobRunner Driver QueueLimit LoopInbox Adapters "
        "EngineMemory Monitoring",
    ),
    "Loading and memory": (
        ("sdk/loading", "sdk/memory"),
        "SamplingDefaults QuantReport MemoryPlan MemoryDemand WeightBytes",
    ),
    "Scheduling": (
        ("sdk/engine",),
        "Scheduler WaitingRequests StepTimes SequenceSpec StepPlan StepResult Drafter Drafts "
        "PromptLookup SuffixAutomaton DraftLengths DecodeCosts Rewinder ResultBudget "
        "ResultReservation AdapterSlots AdapterLoader MetricsRecorder Executor StageTimes "
        "ExpertBalance",
    ),
    "Pages": (
        ("sdk/engine",),
        "PagePool TieredPagePool Prefixes PrefixStore CostOrder SwapSpace BuddyAllocator "
        "Groups FramePool StatePool StateSaves Budget "
        "ElasticPages Snapshot",
    ),
    "One rank": (
        ("sdk/engine/rank",),
        "ModelRunner StepBatch RankRequest Strategy LaunchedBatch RunAhead ForwardPasses "
        "StepInputs DraftingModel DraftingPages HeadFeatures RankAdapters MovingExperts",
    ),
    "Text, sampling, structure": (
        ("sdk/text", "sdk/sampling", "sdk/structured", "sdk/metrics"),
        "BannedMatcher LogitChanges SamplerState Grammar StructuredAnswer Trace",
    ),
    "Models": (
        ("models",),
        "Architecture Decoder Projection Part Mesh ExpertSpec ExpertShare Lockstep "
        "DraftingHead ModelAdapters PackedAdapter",
    ),
    "Files": (
        ("loaders",),
        "HeadFolder AdapterFile StoredMatrix Format StoredLayer",
    ),
    "Numerics": (
        ("quant",),
        "Weight QuantSpec KVTypes KVSpec Checkpoint Tokenizer Adapter LowRank",
    ),
    "Kernels": (
        ("kernels",),
        "Ops Backend Problem Choice BoundLinear Routes RouteRule RankExperts RankTokens "
        "KVType KVPages /sampling.Shape Change SampleBuffers AdapterTable Update MaskTasks "
        "Card Rounding Rounded Graph TorchTape Scratch Products StepGraphs PieceGraphs OnDisk "
        "OnHost /groups.CollectiveGroup SharedGroup Link SharedLink",
    ),
    "Several processes": (
        ("sdk/cluster",),
        "Stream SecureStream Channel ProcessExecutor Workers Children RayRanks RemoteRanks "
        "TcpStore Grid Cards TorchGroup TorchLink ReplicaSet ReplicaProcesses ServedReplicas "
        "Replica ParentProcess Router ReplicaReport Reporter PrefixIndex ReplicaLoad "
        "Simulation Scenario StepCosts HandOverSender HandOverReceiver EnginePages Intake "
        "Pace KVConnector KVListener Offer",
    ),
    "The server": (
        ("sdk/serving",),
        "Exchange Endpoint KeptResponses Live Access Caller GuardedAccess Meter KeyFile "
        "AuditLog Edge Gate LimitedConnection",
    ),
}


def first_sentence(text: str | None) -> str:
    """Of a docstring, as Markdown."""
    first = re.split(r"(?<=[^.][.:])\s|\n\n", (text or "").strip(), maxsplit=1)[0]
    first = re.sub(r":\w+:`~?([^`]*?\.)?([\w]+)`", r"``\2``", " ".join(first.split()))
    return first.replace("``", "`").rstrip(".:").replace("|", "\\|")


def defined(folders: tuple[str, ...]) -> dict[str, list[tuple[str, str]]]:
    """Name of a class -> (file, what it is) of each class of this name."""
    found: dict[str, list[tuple[str, str]]] = {}
    for folder in folders:
        for path in sorted((ROOT / folder).rglob("*.py")):
            place = path.relative_to(ROOT).as_posix()
            if folder == "sdk" and place.split("/")[1] not in ("api", path.name):
                continue
            tree = ast.parse(path.read_text(encoding="utf-8"))
            for node in tree.body:
                if isinstance(node, ast.ClassDef):
                    text = first_sentence(ast.get_docstring(node))
                    if not text or text.startswith("See "):  # an implementation: its module says it
                        text = first_sentence(ast.get_docstring(tree))
                    found.setdefault(node.name, []).append((place, text))
    return found


def page() -> str:
    """The text of the page. :raises SystemExit: a name is not defined, or twice."""
    parts = [HEAD]
    for title, (folders, names) in ROOMS.items():
        known = defined(folders)
        rows = [f"\n## {title}\n", "| type | file | what it is |", "|---|---|---|"]
        for name in names.split():
            file, _, name = name.rpartition(".")
            hits = [hit for hit in known.get(name, ()) if hit[0].endswith(f"{file}.py")]
            if len(hits) != 1:
                places = ", ".join(place for place, _ in hits) or "nothing"
                raise SystemExit(
                    f"type_docs: {name}: expected one class in {', '.join(folders)}, found {places}"
                )
            ((place, text),) = hits
            rows.append(f"| `{name}` | {place} | {text} |")
        parts.append("\n".join(rows) + "\n")
    return "".join(parts)


def main() -> None:
    wanted = page()
    if "--check" in sys.argv[1:]:
        if not PAGE.is_file() or PAGE.read_text(encoding="utf-8") != wanted:
            raise SystemExit("type_docs: docs/architecture/types.md is old: run this script")
        return
    PAGE.parent.mkdir(exist_ok=True)
    PAGE.write_text(wanted, encoding="utf-8")


if __name__ == "__main__":
    main()
