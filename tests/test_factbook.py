"""The factbook table, its questions and tasks, the teacher, and Search task files."""

from __future__ import annotations

import asyncio
import gzip
import itertools
import json
import random
import re
from collections import Counter
from pathlib import Path

import pytest

from envs.search import build_factbook
from envs.search.factbook import (
    ASKED,
    SPLITS,
    TABLE,
    countries,
    passages,
    questions,
    select,
    split_of,
)
from envs.search.factbook_store import search_tasks
from envs.search.parsing import parse_answer, parse_query, parse_route, parse_verdict
from envs.search.prompts import Searching, Step
from envs.search.retrieval.base import Passage
from envs.search.retrieval.bm25 import BM25Retriever
from envs.search.scoring import normalize
from envs.search.tasks import read_tasks
from envs.search.teacher import reply
from envs.search.workflow import SearchWorkflow
from envs.task_rows import TaskError
from envs.workflow import ScriptedTeam, Task
from tests.process_cases import python

ROOT = Path(__file__).resolve().parent.parent
VARIANTS = [(True, True), (True, False), (False, True)]


@pytest.fixture(scope="module")
def retriever():
    return BM25Retriever(passages())


# ---- the table --------------------------------------------------------------------------------


def test_the_committed_table_is_small_and_reproducible(tmp_path):
    data = TABLE.read_bytes()
    assert len(data) < 600_000
    assert data[4:8] == b"\0\0\0\0"  # gzip's time stamp
    rows = [json.loads(line) for line in gzip.decompress(data).splitlines()]
    build_factbook.write(rows, tmp_path / "again.gz")
    assert gzip.decompress((tmp_path / "again.gz").read_bytes()) == gzip.decompress(data)


def test_known_facts():
    facts = {country.name: country.facts for country in countries()}
    chad = facts["Chad"]
    assert chad["capital"] == "N'Djamena" and chad["highest point"] == "Emi Koussi"
    assert chad["currency code"] == "XAF" and chad["internet code"] == ".td"
    assert chad["aircraft prefix"] == "TT" and chad["longest border"] == "Central African Republic"
    assert facts["China"]["currency code"] == "CNY" and facts["Moldova"]["capital"] == "Chisinau"
    assert facts["Brazil"]["capital"] == "Brasília"
    assert facts["Portugal"]["longest border"] == "Spain"
    assert "capital" not in facts["South Africa"]  # it has three
    assert "highest point" not in facts["Italy"]  # shared with France
    assert "longest border" not in facts["Iceland"]


def test_facts_are_clean():
    names = [country.name for country in countries()]
    assert len(set(names)) == len(names) > 240
    for country in countries():
        for field, value in country.facts.items():
            assert value == " ".join(value.split()) and not re.search(r"[;()<>&\n]", value), value
            assert "unnamed" not in value and len(value) <= 40, (country.name, field, value)
        assert re.fullmatch("[A-Z]{3}|", country.facts.get("currency code", ""))
        assert country.facts.get("longest border", "Chad") in names
    assert len({passage.id for passage in passages()}) == len(passages()) > 3500


def package(folder: Path, **records: dict) -> Path:
    for code, record in records.items():
        path = folder / "data" / "somewhere" / f"{code}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(record))
    return folder


def record(name, capital, *, summit="", border=None, total="", currency=""):
    return {
        "Government": {
            "Country name": {
                "conventional short form": {"text": name},
                "conventional long form": {"text": "Republic of X"},
            },
            "Capital": {"name": {"text": capital}},
        },
        "Geography": {
            "Elevation": {"highest point": {"text": summit}},
            "Land boundaries": {"total ": {"text": total}, "border countries": {"text": border}},
        },
        "Economy": {"Exchange rates": {"Currency": {"text": currency}}},
    }


def test_builder_cleans_and_leaves_out(tmp_path):
    folder = package(
        tmp_path,
        aa=record("Alpha", "Ville &eacute;t&eacute; (old name)", summit="Mont A (big) 1,200 m",
                  border="Beta 10 km; Gamma (north) 5 km and Gamma (south) 6.5 km",
                  total="21.5 km", currency="francs (RMB) per US dollar -"),
        bb=record("Beta", "North (administrative capital); South (legislative capital)",
                  summit="unnamed elevation 12 m", border="Alpha 10 km; Gamma 10 km", total="20 km",
                  currency="old (ABC) or new (DEF)"),
        cc=record("Gamma", "Gton; note - moved", summit="Hill on Isle 9 m",
                  border="Alpha 12 km", total="99 km"),
        dd=record("none", "Dville", summit="K5 9 m", border="Alpha 3 km", total="3 km"),
        xx=record("World", "Nowhere"),
    )  # fmt: skip
    rows = {row["name"]: row["facts"] for row in build_factbook.build(folder)}
    assert rows == {
        "Alpha": {
            "capital": "Ville été",
            "highest point": "Mont A",
            "currency code": "CNY",
            "longest border": "Gamma",  # 5 + 6.5 km, more than Beta's 10
        },
        "Beta": {},  # two capitals, no summit's name, two currencies, two equally long borders
        "Gamma": {"capital": "Gton"},  # the border does not add up to the total
        "Republic of X": {"capital": "Dville", "highest point": "K5", "longest border": "Alpha"},
    }


def test_builder_command(tmp_path, capsys):
    folder = package(tmp_path / "p", aa=record("Alpha", "Aville"))
    out = tmp_path / "t.gz"
    assert build_factbook.main([str(folder), "--out", str(out)]) == 0
    assert gzip.decompress(out.read_bytes()) == (
        b'{"id":"aa","name":"Alpha","facts":{"capital":"Aville"}}\n'
    )
    assert "1 rows, 1 facts" in capsys.readouterr().out
    assert build_factbook.main([str(tmp_path / "nothing")]) == 2
    assert "nothing" in capsys.readouterr().err


# ---- questions --------------------------------------------------------------------------------


@pytest.mark.parametrize("hops", [2, 3])
def test_hops_lead_from_the_question_to_the_only_answer(hops):
    texts = {passage.id: passage.contents for passage in passages()}
    holders = Counter(
        (field, normalize(value)) for c in countries() for field, value in c.facts.items()
    )
    seen = set()
    for split in SPLITS:
        for question in questions(split, hops):
            assert len(question.hops) == hops and question.id not in seen
            seen.add(question.id)
            key = question.id.split("/")[2]
            value = texts[question.hops[0].passage].split(": ")[1]
            assert question.question.endswith(f"whose {key} is {value}?")
            assert holders[key, normalize(value)] == 1
            for hop, following in itertools.pairwise(question.hops):
                assert texts[following.passage].startswith(f'"{hop.finds}"\n')
                assert hop.finds not in question.question
                assert all(hop.finds in query for query in following.queries)
            last = texts[question.hops[-1].passage]
            assert last.endswith(
                f"{question.field} of {question.hops[-2].finds}: {question.answers[0]}"
            )
            assert question.hops[-1].finds == question.answers[0]
    assert len(seen) > 3000


def test_splits_share_no_first_country():
    first = {split: {q.id.split("/")[1] for q in questions(split, 2)} for split in SPLITS}
    assert not first["train"] & first["test"]
    assert 0.1 < len(first["test"]) / len(first["train"] | first["test"]) < 0.3
    assert {split_of(c) for c in countries()} == set(SPLITS)


def test_two_hop_example_and_units():
    by_id = {question.id: question for question in questions("train", 2) + questions("test", 2)}
    question = by_id["2/cd/capital/currency code"]
    assert question.question == (
        "What is the currency code of the country whose capital is N'Djamena?"
    )
    assert question.answers == ("XAF",)
    assert [hop.queries[0] for hop in question.hops] == ["capital N'Djamena", "Chad currency code"]
    assert by_id["2/cd/capital/mean elevation"].answers == ("543 m", "543")


@pytest.mark.parametrize("hops", [2, 3])
def test_bm25_finds_every_hop_in_the_top_two(retriever, hops):
    wanted = {
        (query, hop.passage)
        for question in questions("test", hops) + questions("train", hops)[::9]
        for hop in question.hops
        for query in hop.queries
    }
    pairs = sorted(wanted)
    found = asyncio.run(retriever.search([query for query, _ in pairs], 2))
    missed = [
        p
        for p, got in zip(pairs, found, strict=True)
        if p[1] not in [passage.id for passage in got]
    ]
    assert len(pairs) > 500 and not missed


# ---- tasks ------------------------------------------------------------------------------------


def test_search_tasks_are_kept_and_read_by_index(tmp_path):
    tasks = search_tasks(split="train", hops=2, seed=3, size=20, data_dir=tmp_path)
    want = [question.task() for question in select("train", hops=2, fields=None, seed=3, size=20)]
    assert len(tasks) == 20 and list(tasks) == want
    assert tasks[-1] == tasks[19] and tasks[2:5] == want[2:5]
    with pytest.raises(IndexError):
        tasks[20]
    assert list(search_tasks(split="train", seed=3, size=20, data_dir=tmp_path)) == want
    assert [t.id for t in search_tasks(seed=4, size=20, data_dir=tmp_path)] != [t.id for t in want]
    assert list(tmp_path.rglob("*.array_record*"))
    codes = search_tasks(
        split="test", hops=3, fields=["currency code"], seed=0, size=5, data_dir=tmp_path
    )
    assert all(len(t.extra["hops"]) == 3 and t.extra["field"] == "currency code" for t in codes)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"name": "atlas"}, "atlas"),
        ({"split": "validation"}, "validation.*train, test"),
        ({"hops": 4}, "not 4"),
        ({"fields": ["anthem"]}, "anthem.*currency code"),
        ({"size": 10**6}, "size"),
        ({"size": 0}, "size"),
    ],
)
def test_search_tasks_refuses(tmp_path, options, message):
    with pytest.raises(ValueError, match=message):
        search_tasks(**{"split": "train", "data_dir": tmp_path, **options})


def test_search_tasks_load_neither_jax_nor_tensorflow(tmp_path):
    code = (
        "import sys\nfrom envs.search.factbook_store import search_tasks\n"
        f"tasks = search_tasks(size=3, data_dir={str(tmp_path)!r})\nassert tasks[2].answer\n"
        "print([m for m in ('jax', 'tensorflow') if m in sys.modules])"
    )
    out = python("-c", code)
    assert out.stdout == "[]\n", out.stderr


VERL_ROW = {
    "data_source": "nq",
    "prompt": [{"role": "user", "content": "Long instructions. Question: who?"}],
    "ability": "fact-reasoning",
    "reward_model": {"style": "rule", "ground_truth": {"target": ["A", "B", "A"]}},
    "extra_info": {"split": "train", "index": 7},
    "env_kwargs": {"question": "who wrote it", "ground_truth": {"target": ["A", "B"]}},
}


def test_read_tasks(tmp_path):
    import pyarrow
    import pyarrow.parquet

    want = [Task("nq/7", "who wrote it?", ("A", "B"), "nq")]
    jsonl, parquet = tmp_path / "t.jsonl", tmp_path / "t.parquet"
    jsonl.write_text(json.dumps(VERL_ROW) + "\n\n")
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([VERL_ROW]), parquet)
    assert read_tasks(jsonl) == read_tasks(parquet) == want
    bare = tmp_path / "bare.jsonl"
    bare.write_text(
        '{"question": "q?", "golden_answers": ["x"]}\n'
        '{"prompt": [{"role": "user", "content": "p"}], '
        '"reward_model": {"ground_truth": {"target": "y"}}}\n'
    )
    assert read_tasks(bare) == [
        Task("bare/#1", "q?", ("x",), "bare"),
        Task("bare/#2", "p?", ("y",), "bare"),
    ]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "not JSON"),
        ("[]", "need an object"),
        ('{"question": " ", "answer": "x"}', "the question is empty"),
        ('{"question": "q"}', "no gold"),
        ('{"question": "q", "reward_model": {"ground_truth": {"target": []}}}', "no gold"),
        ('{"question": "q", "answer": ["x", 3]}', "no gold"),
        ('{"question": "q", "answer": "x", "extra_info": "train"}', "extra_info"),
    ],
)
def test_a_bad_task_row_names_the_file_and_the_line(tmp_path, line, message):
    path = tmp_path / "bad.jsonl"
    path.write_text('{"question": "q", "answer": "x"}\n\n' + line + "\n")
    with pytest.raises(TaskError, match=rf"bad\.jsonl:3: .*{message}"):
        read_tasks(path)


def test_task_files_that_are_none(tmp_path):
    (tmp_path / "a.parquet").write_text("no")
    (tmp_path / "b.jsonl").write_text("\n")
    for name in ("a.parquet", "b.jsonl", "c.jsonl", "d.csv"):
        with pytest.raises(TaskError, match=re.escape(name)):
            read_tasks(tmp_path / name)


# ---- the teacher ------------------------------------------------------------------------------


def episodes(retriever, tasks, poor, variant, max_turns=2):
    """Exact matches and teams of episodes that the teacher plays."""
    workflow = SearchWorkflow(
        retriever=retriever, workers=2, router=variant[0], verifier=variant[1],
        max_turns=max_turns, topk=2, max_passages=2, passage_tokens=32, prompt_style="short",
    )  # fmt: skip
    rng = random.Random(1)

    async def play():
        for task in tasks:
            team = ScriptedTeam(
                lambda role, state, prompt, t=task: reply(role, state, t, rng, poor)
            )
            outcome = await workflow.run(task, team)
            score = await workflow.reward(task, outcome, team)
            yield score.correct, team

    async def collect():
        return [episode async for episode in play()]

    return asyncio.run(collect())


def match_rate(played):
    return sum(correct for correct, _ in played) / len(played)


@pytest.mark.parametrize("variant", VARIANTS)
def test_an_errorless_team_answers_everything_in_as_many_turns_as_hops(retriever, variant):
    for hops in (2, 3):
        tasks = [q.task() for q in select("train", hops=hops, fields=None, seed=0, size=100)]
        played = episodes(retriever, tasks, 0.0, variant, max_turns=hops)
        assert match_rate(played) == 1.0
        assert not any(call.malformed for _, team in played for call in team.calls)


def test_errors_cost_answers_and_stay_in_the_format(retriever):
    tasks = [q.task() for q in select("train", hops=2, fields=None, seed=0, size=100)]
    played = {poor: episodes(retriever, tasks, poor, (True, True)) for poor in (0.1, 0.4)}
    assert 0.4 < match_rate(played[0.1]) < 0.85 and match_rate(played[0.4]) < 0.2
    assert not any(call.malformed for _, team in played[0.4] for call in team.calls)


def chad(*fields) -> tuple[Task, Searching]:
    (question,) = (
        q for s in SPLITS for q in questions(s, 2) if q.id == "2/cd/capital/currency code"
    )
    texts = {p.id: p for p in passages()}
    steps = (Step(("q",), tuple(texts[f"cd/{field}"] for field in fields)),) if fields else ()
    return question.task(), Searching(question.question, steps=steps)


def test_what_the_teacher_says():
    def say(role, *fields, poor=0.0):
        task, state = chad(*fields)
        return reply(role, state, task, random.Random(0), poor)

    assert parse_query(say("worker_1")) == "capital N'Djamena"
    assert parse_query(say("worker_2")) == "country with capital N'Djamena"
    assert parse_query(say("worker_1", "capital")) == "Chad currency code"
    assert parse_query(say("worker_2", "capital")) == "currency code of Chad"
    both = ("capital", "currency code")
    assert parse_verdict(say("verifier")) is parse_verdict(say("verifier", "capital")) is False
    assert parse_verdict(say("verifier", *both)) is True
    assert parse_verdict(say("verifier", poor=1.0)) is True
    assert parse_answer(say("answerer", *both)) == "XAF"
    assert parse_answer(say("answerer", *both, poor=1.0)) == "N'Djamena"
    assert parse_answer(say("answerer", "area")) == "1.284 million sq km"
    assert parse_answer(say("answerer")) == "unknown"
    assert parse_route(say("router", *both), 2) == ()
    assert parse_route(say("router", poor=1.0), 2) == ()
    task, state = chad()
    routes = {parse_route(reply("router", state, task, random.Random(i)), 2) for i in range(30)}
    assert routes == {(1,), (2,), (1, 2)}
    right = {"capital N'Djamena", "Chad currency code"}
    wrong = {
        parse_query(reply("worker_1", chad(*f)[1], task, random.Random(i), 1.0))
        for f in ((), ("capital",))
        for i in range(20)
    }
    assert "capital N'Djamena" in wrong  # hop 1 once more
    assert len(wrong - right) > 10 and "Chad currency code" not in wrong


def test_the_teacher_needs_hops():
    with pytest.raises(ValueError, match="t1"):
        reply("router", Searching("q"), Task("t1", "q", "a"), random.Random(0))


def test_short_chats_fit_a_tiny_model(retriever):
    """With 2,048 byte-level BPE tokens: prompts within 224 but for a few, responses within 32."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    tasks = [q.task() for q in select("test", hops=2, fields=None, seed=0, size=150)]
    played = episodes(retriever, tasks, 0.2, (True, True)) + episodes(
        retriever, tasks, 0.0, (True, True)
    )
    calls = [call for _, team in played for call in team.calls]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=2048, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    texts = [p.contents for p in passages()] + [q.question for q in questions("train", 2)]
    tags = [output.text for call in calls for output in call.outputs]
    tokenizer.train_from_iterator(texts + tags, trainer)

    def length(text):
        return len(tokenizer.encode(text).ids)

    around = 12  # the chat template's own tokens
    prompts = [length(p.system) + length(p.text()) + around for c in calls for p in c.prompts]
    responses = [length(output.text) for call in calls for output in call.outputs]
    assert sum(n > 224 for n in prompts) <= 0.01 * len(prompts)
    assert max(responses) <= 32
    assert sum(length(p.contents) > 32 for p in passages()) <= 0.02 * len(passages())


def test_every_asked_field_has_questions():
    assert {q.field for q in questions("train", 2)} == set(ASKED)


def test_passage_form():
    assert passages()[0] == Passage("aa/capital", '"Aruba"\ncapital of Aruba: Oranjestad')
