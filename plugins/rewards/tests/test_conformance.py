import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from engine_plugin_testing import RewardRunnerSuite
from engine_plugin_testing import RewardSuite as Suite

FOUR = {"completion": "2 + 2 = 4", "answer": "4"}


class RewardSuite(Suite):
    """The suite with workers of rewards that are forks where ``ENGINE_TEST_FORK`` is set."""

    worker_context = "forked_children:forked"


class TestExactMatch(RewardSuite):
    name = "exact_match"
    options = {"after": "=", "ignore_case": True}
    examples = [
        (FOUR, 1.0),
        (FOUR | {"answer": "5"}, 0.0),
        (FOUR | {"answer": None}, None),
        (FOUR | {"completion": "4"}, 0.0),
        (FOUR | {"completion": "x = 3, so y = 4"}, 1.0, "4"),
        (FOUR | {"completion": "y = 4, so x = 3"}, 0.0, "3"),
    ]


class TestNumeric(RewardSuite):
    name = "numeric"
    examples = [
        (FOUR, 1.0, "4"),
        (FOUR | {"answer": "... #### 5"}, 0.0, "4"),
        (FOUR | {"answer": None}, None),
        (FOUR | {"completion": "8/2"}, 1.0, "4"),
        (FOUR | {"completion": "4.00"}, 1.0, "4"),
        (FOUR | {"completion": "-0.50"}, 0.0, "-0.5"),
        (FOUR | {"completion": "none"}, 0.0, None),
        (FOUR | {"completion": r"\boxed{4} of 5"}, 1.0, "4"),
        (FOUR | {"completion": r"4, so \boxed{unknown}"}, 1.0, "4"),
    ]
    failing = [FOUR | {"answer": "unknown"}]


@pytest.mark.slow
class TestNumericTolerances(RewardSuite):
    """The larger one of the two tolerances is allowed, not their sum."""

    name = "numeric"
    options = {"tolerance": 0.5, "relative_tolerance": 0.01}
    examples = [
        ({"completion": "126.2", "answer": "125"}, 1.0, "125"),
        ({"completion": "126.4", "answer": "125"}, 0.0, "126.4"),
        ({"completion": "123.6", "answer": "125"}, 0.0, "123.6"),
        (FOUR | {"completion": "4.5"}, 1.0, "4"),
        (FOUR | {"completion": "4.52"}, 0.0, "4.52"),
        (FOUR | {"completion": "-4"}, 0.0, "-4"),
        # a share of the answer, not of the response
        ({"completion": "991", "answer": "1001"}, 1.0, "1001"),
        ({"completion": "1011.05", "answer": "1001"}, 0.0, "1011.05"),
        ({"completion": "-991", "answer": "-1001"}, 1.0, "-1001"),
        ({"completion": "-1011.05", "answer": "-1001"}, 0.0, "-1011.05"),
        ({"completion": "-126.2", "answer": "-125"}, 1.0, "-125"),
    ]


@pytest.mark.slow
class TestNumericInTheBox(RewardSuite):
    name = "numeric"
    options = {"boxed": "only"}
    examples = [
        (FOUR | {"completion": r"5 or \boxed{4}, not 3"}, 1.0, "4"),
        (FOUR | {"completion": r"\boxed{4} or \boxed{5}"}, 0.0, "5"),
        (FOUR | {"completion": r"It is 4. \boxed{unknown}"}, 0.0, None),
        ({"completion": r"\boxed{1{,}234}", "answer": "1234"}, 1.0, "1234"),
        (FOUR, 0.0, None),
    ]


@pytest.mark.slow
class TestNumericWithoutTheBox(RewardSuite):
    name = "numeric"
    options = {"boxed": "ignore"}
    examples = [
        (FOUR | {"completion": r"\boxed{4}, not 3"}, 0.0, "3"),
        (FOUR | {"completion": r"\boxed{3}, so 4"}, 1.0, "4"),
    ]


@pytest.mark.slow
class TestMath(RewardSuite):
    name = "math"
    failing = [FOUR | {"answer": ""}, FOUR | {"answer": "#### "}]
    examples = [
        ({"completion": r"so \boxed{\frac{2}{4}}", "answer": r"\frac12"}, 1.0),
        (FOUR | {"answer": "5"}, 0.0),
    ]


@pytest.mark.slow
class TestFormat(RewardSuite):
    name = "format"
    bounds = (0.0, 1.0)
    examples = [
        ("<think>a</think> <answer>4</answer>", 1.0),
        ("4", 0.0),
        ("<think>a</think> <answer>4</answer> more", 0.0),
    ]


@pytest.mark.slow
class TestLength(RewardSuite):
    name = "length"
    options = {"max_tokens": 20, "buffer_tokens": 10, "penalty": 0.5}
    bounds = (-0.5, 0.0)
    examples = [
        ({"response_length": 0}, 0.0),
        ({"response_length": 5}, 0.0),
        ({"response_length": 10}, 0.0),
        ({"response_length": 15}, -0.25),
        ({"response_length": 30}, -0.5),
    ]


class TestPython(RewardSuite):
    name = "python"
    options = {"path": "short_answers.py", "allow_local_code": True, "arguments": {"most": 3}}
    examples = [("abc", 1.0), ("abcd", 0.0)]
    failing = [("late", "timeout"), ("fail", "error")]


@pytest.mark.slow
class TestAsync(RewardSuite):
    name = "python"
    options = {
        "path": "short_answers.py",
        "function": "score_later",
        "allow_local_code": True,
        "arguments": {"most": 3},
    }
    examples = [("abc", 1.0), ("abcd", 0.0)]


@pytest.mark.slow
class TestAsyncGroups(RewardSuite):
    name = "python"
    options = {"path": "short_answers.py", "function": "shortest", "allow_local_code": True}
    examples = [
        ([{"completion": "abc"}, {"completion": "a"}], [0.0, 1.0]),
        ([{"completion": "ab"}, {"completion": "cd"}, {"completion": "e f"}], [1.0, 1.0, 0.0]),
    ]


@pytest.mark.slow
class TestAsyncObject(RewardSuite):
    name = "python"
    options = {"path": "short_answers.py", "function": "later", "allow_local_code": True}
    examples = [("2 + 2 = 4", 1.0), ("5", 0.0)]


@pytest.mark.slow
class TestVerl(RewardSuite):
    """``ground_truth`` is the column of this name, and the column ``answer`` only where the data has no other."""

    name = "python"
    options = {"path": "short_answers.py", "function": "compute_score", "allow_local_code": True}
    examples = [
        ({"completion": "4", "answer": "5", "ground_truth": "4", "data_source": "sums"}, 1.0),
        ({"completion": "5", "answer": "5", "ground_truth": "4", "data_source": "sums"}, 0.0),
    ]


class Lengths(BaseHTTPRequestHandler):
    """A server whose scores are the lengths of the completions, and that refuses ``fail``."""

    def do_POST(self):
        sent = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.send_response(400 if sent["completions"] == ["fail"] else 200)
        self.end_headers()
        self.wfile.write(json.dumps({"scores": [len(text) for text in sent["completions"]]}).encode())

    def log_message(self, *args):
        pass


class TestHTTP(RewardSuite):
    name = "http"
    failing = [("fail", "error")]
    examples = [("abc", 3.0), ("", 0.0), ({"completion": "\u00e9", "prompt": "Q"}, 1.0)]

    @classmethod
    def setup_class(cls):
        cls.server = ThreadingHTTPServer(("127.0.0.1", 0), Lengths)
        threading.Thread(target=cls.server.serve_forever, daemon=True).start()
        cls.options = {"url": f"http://127.0.0.1:{cls.server.server_port}/"}
        super().setup_class()

    @classmethod
    def teardown_class(cls):
        super().teardown_class()
        cls.server.shutdown()
        cls.server.server_close()


class TestRunner(RewardRunnerSuite):
    worker_context = "forked_children:forked"
