"""BM25, corpora, the retrieval server and its client."""

from __future__ import annotations

import asyncio
import gzip
import math
import socket
import threading
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from envs.search.retrieval.base import Passage, RetrievalError
from envs.search.retrieval.bm25 import BM25Retriever, words
from envs.search.retrieval.corpus import CorpusError, load_corpus, read_corpus
from envs.search.retrieval.http_client import HTTPRetriever, parse_result
from envs.search.retrieval.server import create_app
from envs.workflow import ScriptedTeam
from launch import serve_retriever
from tests.linear_time import assert_linear
from tests.process_cases import python

ROOT = Path(__file__).resolve().parent.parent
ANIMALS = ["a cat purrs", "a dog plays", "a bird flies", "a fish swims"]


def corpus(*contents: str) -> list[Passage]:
    return [Passage(str(i), text) for i, text in enumerate(contents)]


def ids(found: list[list[Passage]]) -> list[list[str]]:
    return [[passage.id for passage in one] for one in found]


# ---- BM25 -------------------------------------------------------------------------------------


def test_more_wanted_than_there_are_and_unseen_queries():
    retriever = BM25Retriever(corpus(*ANIMALS))
    found = asyncio.run(retriever.search(["cat", "zebra quagga", "", "a"], 10))
    assert ids(found) == [["0"], [], [], ["0", "1", "2", "3"]]


def test_results_follow_the_order_of_the_queries():
    retriever = BM25Retriever(corpus(*ANIMALS))
    found = asyncio.run(retriever.search(["fish", "unseen", "cat", "dog"], 1))
    assert ids(found) == [["3"], [], ["0"], ["1"]]


def test_scores_are_lucenes_and_ties_keep_the_corpus_order():
    retriever = BM25Retriever(corpus("foo", "dog", "baz", "quick god", "quick fox"), k1=1.5, b=0.75)
    idf = math.log(1 + (5 - 2 + 0.5) / (2 + 0.5))
    score = idf / (1 + 1.5 * (0.25 + 0.75 * 2 / 1.4))
    assert score == pytest.approx(0.2935703550408287)
    assert retriever.scores("quick") == pytest.approx([0, 0, 0, score, score], abs=1e-6)
    (found,) = asyncio.run(retriever.search(["quick"], 2))
    assert [passage.id for passage in found] == ["3", "4"]
    assert found[0].score == found[1].score == pytest.approx(score, abs=1e-6)


def test_a_cut_through_equal_scores_keeps_the_first_ones():
    retriever = BM25Retriever(corpus("x y", "x z", "x", "x w", "y"))
    (found,) = asyncio.run(retriever.search(["x"], 3))
    assert [passage.id for passage in found] == ["2", "0", "1"]


def test_an_empty_passage_and_an_empty_corpus():
    retriever = BM25Retriever(corpus("", "cat", "..."))
    assert ids(asyncio.run(retriever.search(["cat"], 5))) == [["1"]]
    with pytest.raises(ValueError, match="empty"):
        BM25Retriever([])


def test_words():
    assert words("N'Djamena: 1,284,000 sq km, .td É") == [
        "n", "djamena", "1,284,000", "sq", "km", "td", "é",
    ]  # fmt: skip


def test_one_text_in_two_encodings_is_one():
    """An accent composed with its letter (NFC), and the two as characters of their own (NFD)."""
    composed, apart = "Beyonc\u00e9 sings", "Beyonce\u0301 sings"
    assert words(composed) == words(apart) == ["beyonc\u00e9", "sings"]
    for passage, query in ((composed, apart), (apart, composed)):
        retriever = BM25Retriever(corpus("Beyonc", passage, "another"))
        (found,) = asyncio.run(retriever.search([query.split()[0]], 3))
        assert [hit.id for hit in found] == ["1"]


def test_finding_words_takes_linear_time():
    assert_linear(words, "word ", "1,", "1.", "9", "e\u0301", "\u0301", ",", "1 ", "\u1100\u1161")


def test_importing_the_search_modules_loads_neither_jax_nor_tensorflow():
    code = (
        "import sys, envs.search.workflow, envs.search.retrieval.bm25, envs.search.teacher, "
        "envs.search.retrieval.corpus, envs.search.retrieval.http_client\n"
        "names = ('jax', 'bm25s', 'tensorflow', 'tensorflow_datasets')\n"
        "print([name for name in names if name in sys.modules])"
    )
    out = python("-c", code)
    assert out.stdout.strip() == "[]", out.stderr


# ---- corpora ----------------------------------------------------------------------------------


def test_read_corpus(tmp_path):
    text = '{"id": "a", "contents": "\\"T\\"\\nx"}\n\n{"id": 7, "contents": "y"}\n'
    plain, packed = tmp_path / "c.jsonl", tmp_path / "c.jsonl.gz"
    plain.write_text(text)
    packed.write_bytes(gzip.compress(text.encode()))
    want = [Passage("a", '"T"\nx'), Passage("7", "y")]
    assert read_corpus(plain) == read_corpus(packed) == want == load_corpus(str(plain))


@pytest.mark.parametrize(
    ("lines", "where"),
    [
        (["{"], ":1: "),
        (['{"id": 1, "contents": "x"}', "[]"], ":2: want a JSON object"),
        (['{"id": 1, "contents": "x"}', "", '{"contents": "x"}'], ':3: "id"'),
        (['{"id": 1, "contents": null}'], ':1: "contents"'),
        (['{"id": 1, "contents": "x"}', '{"id": "1", "contents": "y"}'], ":2: id '1' .* line 1"),
        ([], "no passages"),
    ],
)
def test_a_bad_corpus_names_the_file_and_the_line(tmp_path, lines, where):
    path = tmp_path / "bad.jsonl"
    path.write_text("\n".join(lines))
    with pytest.raises(CorpusError, match=rf"bad\.jsonl.*{where}"):
        read_corpus(path)


def test_a_missing_corpus_and_one_that_is_not_gzip(tmp_path):
    with pytest.raises(CorpusError, match=r"none\.jsonl"):
        read_corpus(tmp_path / "none.jsonl")
    (tmp_path / "c.jsonl.gz").write_text("plain")
    with pytest.raises(CorpusError, match=r"c\.jsonl\.gz"):
        read_corpus(tmp_path / "c.jsonl.gz")
    (tmp_path / "d.jsonl.gz").write_bytes(gzip.compress(b'{"id": 1, "contents": "x"}')[:-9])
    with pytest.raises(CorpusError, match=r"d\.jsonl\.gz"):  # cut short
        read_corpus(tmp_path / "d.jsonl.gz")


# ---- server -----------------------------------------------------------------------------------


def post(app, body, raw=None):
    async def send():
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            if raw is not None:
                return await client.post("/retrieve", content=raw)
            return await client.post("/retrieve", json=body)

    return asyncio.run(send())


def test_server_speaks_both_forms_with_and_without_scores():
    app = create_app(BM25Retriever(corpus(*ANIMALS)))
    body = post(app, {"queries": ["cat", "a", "none"], "topk": 2, "return_scores": True}).json()
    cat = {"id": "0", "contents": "a cat purrs"}
    assert [len(entries) for entries in body["result"]] == [1, 2, 0]
    assert body["result"][0][0]["document"] == cat and body["result"][0][0]["score"] > 0
    assert post(app, {"query": "cat"}).json() == {"result": [[cat]]}
    assert len(post(app, {"query": "a", "topk": None}).json()["result"][0]) == 3
    assert post(app, {"queries": []}).json() == {"result": []}


@pytest.mark.parametrize(
    "body",
    [
        {},
        [],
        {"query": "a", "queries": ["a"]},
        {"query": 1},
        {"queries": "a"},
        {"queries": [1]},
        {"query": "a", "topk": 0},
        {"query": "a", "topk": True},
        {"query": "a", "topk": "3"},
        {"query": "a", "topk": 10**9},
        {"query": "a", "return_scores": "yes"},
    ],
)
def test_server_refuses_bad_requests(body):
    answer = post(create_app(BM25Retriever(corpus("a"))), body)
    assert answer.status_code == 400 and answer.json()["error"]


def test_server_refuses_what_is_no_json_and_reports_a_failed_search():
    class Down:
        async def search(self, queries, topk):
            raise RetrievalError("index gone")

    assert post(create_app(Down()), None, raw=b"{").status_code == 400
    answer = post(create_app(Down()), {"query": "a"})
    assert answer.status_code == 503 and answer.json() == {"error": "index gone"}


# ---- client -----------------------------------------------------------------------------------


@contextmanager
def serving(app):
    """The app on a free port of this machine; gives its address."""
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(app, log_level="error", lifespan="off"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()


class Script:
    """An app that answers from a list, its last entry for ever, and keeps the request bodies."""

    def __init__(self, *answers):
        self.answers = list(answers)
        self.bodies = []
        self.app = Starlette(routes=[Route("/retrieve", self.answer, methods=["POST"])])

    async def answer(self, request):
        self.bodies.append(await request.json())
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, Response):
            return answer
        if callable(answer):
            return await answer()
        return JSONResponse(answer)


def ask(addresses, queries, topk=2, **options):
    async def run():
        retriever = HTTPRetriever(addresses, backoff=0.0, **options)
        try:
            return await retriever.search(queries, topk)
        finally:
            await retriever.close()

    return asyncio.run(run())


@pytest.mark.parametrize("form", ["queries", "query"])
def test_client_and_server_agree_with_the_retriever_itself(form):
    retriever = BM25Retriever(corpus(*ANIMALS))
    queries = ["a fish", "cat", "unseen", "a"]
    with serving(create_app(retriever)) as address:
        found = ask([address + "/"], queries, form=form)
    assert found == asyncio.run(retriever.search(queries, 2))


def test_client_sends_what_each_form_says():
    script = Script({"result": [[], []]})
    with serving(script.app) as address:
        assert ask([address], ["x", "y"], topk=5) == [[], []]
        assert ask([address], []) == []
    assert script.bodies == [{"queries": ["x", "y"], "topk": 5, "return_scores": True}]
    script = Script({"result": [[]]})
    with serving(script.app) as address:
        ask([address + "/retrieve"], ["x"], topk=5, form="query")
    assert script.bodies == [{"query": "x", "topk": 5, "return_scores": True}]


def test_client_retries_server_errors_and_then_succeeds():
    script = Script(Response("busy", 503), Response("oops", 500), {"result": [[]]})
    with serving(script.app) as address:
        assert ask([address], ["x"]) == [[]]
    assert len(script.bodies) == 3


def test_client_gives_up_after_its_tries():
    script = Script(Response("oops", 500))
    with (
        serving(script.app) as address,
        pytest.raises(RetrievalError, match=r"500: oops \(3 tries\)"),
    ):
        ask([address], ["x"], tries=3)
    assert len(script.bodies) == 3


def test_client_does_not_retry_a_refused_request():
    script = Script(JSONResponse({"error": "bad topk"}, status_code=400))
    with serving(script.app) as address, pytest.raises(RetrievalError, match=r"400.*bad topk"):
        ask([address], ["x"])
    assert len(script.bodies) == 1


def test_client_moves_on_from_a_dead_address_and_from_a_slow_one():
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))  # bound but not listening: connections are refused
        dead = f"http://127.0.0.1:{unused.getsockname()[1]}"
        alive = Script({"result": [[]]})
        with serving(alive.app) as address:
            assert ask([dead, address], ["x"]) == [[]]
            with pytest.raises(RetrievalError, match=r"refused \(2 tries\)"):
                ask([dead], ["x"], tries=2)

    async def slow():
        await asyncio.sleep(1)

    stuck = Script(slow)
    with serving(stuck.app) as slow_address, serving(alive.app) as address:
        assert ask([slow_address, address], ["x"], timeout=0.2) == [[]]
    assert len(stuck.bodies) == 1


def test_client_takes_turns_between_addresses():
    first, second = Script({"result": [[]]}), Script({"result": [[]]})

    async def run(addresses):
        retriever = HTTPRetriever(addresses)
        for _ in range(4):
            await retriever.search(["x"], 1)
        await retriever.close()

    with serving(first.app) as one, serving(second.app) as two:
        asyncio.run(run([one, two]))
    assert len(first.bodies) == len(second.bodies) == 2


def test_client_survives_a_new_event_loop():
    script = Script({"result": [[]]})
    with serving(script.app) as address:
        retriever = HTTPRetriever([address])
        for _ in range(2):
            assert asyncio.run(retriever.search(["x"], 1)) == [[]]


def test_back_off_doubles_up_to_its_cap(monkeypatch):
    waits = []

    async def sleep(seconds):
        waits.append(seconds)

    async def refuse(self, request, stream):
        raise httpx.ConnectError("down")

    monkeypatch.setattr("envs.http_client.asyncio.sleep", sleep)
    monkeypatch.setattr(httpx.AsyncClient, "send", refuse)
    with pytest.raises(RetrievalError, match="ConnectError down \\(6 tries"):
        asyncio.run(HTTPRetriever(["http://x"], tries=6, backoff=0.5).search(["q"], 1))
    assert waits == [0.5, 1.0, 2.0, 4.0, 4.0]


def test_an_answer_that_breaks_off_is_asked_for_again():
    """A search may be made twice."""
    cut = Response("{", headers={"Content-Length": "1"})
    cut.raw_headers = [(name, b"9" if name == b"content-length" else value)
                       for name, value in cut.raw_headers]  # fmt: skip
    script = Script(cut, {"result": [[]]})
    with serving(script.app) as address:
        assert ask([address], ["x"]) == [[]]
    assert len(script.bodies) == 2


def test_waiting_for_a_connection_is_no_time_of_the_tool():
    """Twelve searches of 0.15 s over two connections take 0.9 s; the limit of each is 0.6 s."""

    async def slow():
        await asyncio.sleep(0.15)
        return JSONResponse({"result": [[]]})

    async def episode(retriever):
        return await ScriptedTeam([], tool_seconds=0.6).tool("retrieve", retriever.search, ["x"], 1)

    async def main(address):
        retriever = HTTPRetriever([address], connections=2)
        try:
            return await asyncio.gather(*(episode(retriever) for _ in range(12)))
        finally:
            await retriever.close()

    with serving(Script(slow).app) as address:
        assert asyncio.run(main(address)) == [[[]]] * 12


def test_parse_result_takes_both_forms():
    document = {"id": 5, "contents": "x", "title": "ignored"}
    assert parse_result({"result": [[document]]}, 1) == [[Passage("5", "x")]]
    assert parse_result({"result": [[{"document": document, "score": 0.5}], []]}, 2) == [
        [Passage("5", "x", 0.5)],
        [],
    ]
    assert parse_result({"result": [[{"contents": "no id"}]]}, 1) == [[Passage("no id", "no id")]]


@pytest.mark.parametrize(
    "answer",
    [
        None,
        {},
        {"result": {}},
        {"result": [{"contents": "flat"}]},
        {"result": []},
        {"result": [[], []]},
        {"result": [["text"]]},
        {"result": [[{"document": {"id": 1}}]]},
        {"result": [[{"id": 1, "contents": None}]]},
        {"result": [[{"document": {"id": 1, "contents": "x"}, "score": [1]}]]},
        {"result": [[{"document": {"id": 1, "contents": "x"}, "score": 10**400}]]},
    ],
)
def test_an_answer_of_another_shape_fails_for_good(answer):
    with pytest.raises(ValueError):
        parse_result(answer, 1)
    script = Script(JSONResponse(answer))
    with serving(script.app) as address, pytest.raises(RetrievalError):
        ask([address], ["x"])
    assert len(script.bodies) == 1


@pytest.mark.parametrize(
    "answer",
    ["<html>", "[" * 100_000, b"\xff", "9" * 5000, '{"result": [[{"contents": "\\ud800"}]]}'],
)
def test_an_answer_that_is_no_json_fails_for_good(answer):
    with (
        serving(Script(Response(answer)).app) as address,
        pytest.raises(RetrievalError, match=r"http.* not JSON"),
    ):
        ask([address], ["x"])


def test_refused_client_arguments():
    for addresses in ("http://one", [], ["127.0.0.1:8000"], ["http://[::1"]):
        with pytest.raises(ValueError, match="address"):
            HTTPRetriever(addresses)
    with pytest.raises(ValueError, match="form"):
        HTTPRetriever(["http://x"], form="batch")
    with pytest.raises(ValueError, match="tries"):
        HTTPRetriever(["http://x"], tries=0)


# ---- launch -----------------------------------------------------------------------------------


def test_serve_retriever_refuses_in_one_line(capsys, tmp_path):
    with pytest.raises(SystemExit) as stop:
        serve_retriever.main(["factbook", "--index", "dense"])
    assert stop.value.code == 2
    error = capsys.readouterr().err
    assert "dense" in error and error.count("\n") == 1
    out = python("-m", "launch.serve_retriever", str(tmp_path / "none.jsonl"))
    assert out.returncode == 2
    assert "none.jsonl" in out.stderr and out.stderr.count("\n") == 1
