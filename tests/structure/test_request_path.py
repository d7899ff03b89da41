"""A request from its caller to the ranks: few forms, its properties listed once, few bytes."""

from __future__ import annotations

import ast
import inspect
import pickle
from dataclasses import fields
from pathlib import Path
from typing import get_type_hints

from sdk import LLM, SamplingParams
from sdk.engine.engine import Engine
from sdk.engine.job import Job
from sdk.engine.plan import RequestStart, SequenceSpec
from sdk.engine.rank.request import RankRequest
from sdk.engine.scheduling.request import Request
from sdk.requests.job_maker import JobMaker
from sdk.requests.prompts.reader import Prompt
from tests.counted import lines_run
from tests.traced_files import ROOT, traced_files

#: The forms that a request takes, in this order.
FORMS = (Prompt, Job, Request, RequestStart, RankRequest)
#: What a request consists of.
PROPERTIES = {one.name for kind in (SequenceSpec, Job) for one in fields(kind)} - {"spec"}
#: What names this many of them is a list of them.
LIST = 6
#: Where they are listed: two types declare them, each of them once, and one call fills them in.
LISTED = {"sdk/engine/plan.py", "sdk/engine/job.py", "sdk/requests/job_maker.py"}
ROOMS = ("api", "engine", "executors", "requests", "sampling", "loading", "cluster", "testing")
#: As measured, and one that a platform may need.
MAX_FILES = 71


def names(node: ast.AST) -> set[str]:
    """What a class declares, a function takes or a call passes by name."""
    if isinstance(node, ast.ClassDef):
        slots = [s for s in node.body if isinstance(s, ast.Assign)]
        values = [v.value for s in slots for v in ast.walk(s) if isinstance(v, ast.Constant)]
        own = [s.target.id for s in node.body if isinstance(s, ast.AnnAssign)]
        return {*own, *map(str, values)}
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        every = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
        return {one.arg for one in every}
    if isinstance(node, ast.Call):
        return {one.arg for one in node.keywords if one.arg}
    return set()


def lists(path: Path) -> list[int]:
    """The lines on which a list of a request's properties begins."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return [n.lineno for n in ast.walk(tree) if len(names(n) & PROPERTIES) >= LIST]


def test_the_properties_of_a_request_are_listed_where_they_are_declared_and_made() -> None:
    found: dict[str, list[int]] = {}
    for room in ROOMS:
        for path in sorted((ROOT / "sdk" / room).rglob("*.py")):
            if lines := lists(path):
                found[path.relative_to(ROOT).as_posix()] = lines
    assert set(found) == LISTED
    assert {name: len(lines) for name, lines in found.items()} == {
        "sdk/engine/plan.py": 1,
        "sdk/engine/job.py": 1,
        "sdk/requests/job_maker.py": 2,  # a Job and its spec, in one expression
    }
    declared = [one.name for kind in (SequenceSpec, Job) for one in fields(kind)]
    assert len(declared) == len(set(declared))


def test_each_form_of_a_request_is_made_from_the_one_before() -> None:
    assert len(FORMS) <= 5
    made = get_type_hints(JobMaker.make)
    assert "Prompt" in str(made["prompts"]) and made["return"] == list[Job]
    assert inspect.signature(Engine.add).parameters.keys() == {"self", "job"}
    assert get_type_hints(Engine.add)["job"] is Job
    assert get_type_hints(Request.__init__)["job"] is Job
    assert get_type_hints(Request.start)["return"] is RequestStart
    assert get_type_hints(RankRequest.__init__)["start"] is RequestStart


def test_a_request_s_start_carries_what_ranks_need_and_few_bytes() -> None:
    start = RequestStart(
        SequenceSpec("#7", SamplingParams(prompt_logprobs=1)), tuple(range(20)), 20, 0, (1, 2, 3)
    )
    data = pickle.dumps(start, protocol=pickle.HIGHEST_PROTOCOL)
    assert pickle.loads(data) == start
    assert len(data) < 400  # 1,338 before, most of them names and values of default parameters
    only = {one.name for one in fields(Job)} - {"spec"}
    assert not only & {*RequestStart._fields, *(one.name for one in fields(SequenceSpec))}


def test_a_short_generate_passes_few_files(smollm2: Path) -> None:
    params = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
    with traced_files() as trace, LLM(smollm2, max_model_len=128, max_num_seqs=4) as llm:
        llm.generate("The capital of France is", params, use_tqdm=False)
        trace.on = True
        llm.generate("The capital of Spain is not", params, use_tqdm=False)
        trace.on = False
    assert {"sdk/requests/generation_methods.py", "sdk/engine/engine.py"} <= trace.files
    assert len(trace.files) <= MAX_FILES, sorted(trace.files)


def test_a_request_and_its_steps_run_few_lines_of_python(smollm2: Path) -> None:
    """Counted in the thread that steps; forms and files may not be fewer at the cost of time."""
    params = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
    with LLM(smollm2, max_model_len=128, max_num_seqs=4) as llm:
        for text in ("The capital of Norway is", "abc def ghi"):  # the first one compiles
            queued = lines_run(lambda text=text: llm.enqueue(text, params))
            steps = []
            while llm.has_unfinished_requests:
                steps.append(lines_run(llm.step))
    assert queued < 560  # 519 before a request had one description, 512 since
    assert sorted(steps)[1] < 480  # 439 and 439: a token that is decoded and streamed
    assert steps[0] < 1750  # 1,619 and 1,597: it starts
