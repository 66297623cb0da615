"""What the host takes from options, from requests and from the command line; vLLM is not needed."""

from __future__ import annotations

import json

import pytest

from routebook.errors import ConfigError, RequestError
from routebook.hosts.vllm.config import HostConfig
from routebook.hosts.vllm.launch import SCHEDULER, WORKER, check_platform, engine_args
from routebook.hosts.vllm.releases import release_of
from routebook.hosts.vllm.serve import server_arguments


def test_options_travel_in_the_additional_config():
    config = HostConfig(rows="asked")
    additional = config.add_to({"other": 1})
    assert additional["other"] == 1
    assert HostConfig.read(json.loads(json.dumps(additional))) == config
    assert HostConfig.read({}) == HostConfig.read(None) == HostConfig()


@pytest.mark.parametrize(
    ("additional", "named"),
    [
        ({"routebook": {"colour": 1}}, "'colour'"),
        ({"routebook": {"rows": "some"}}, "rows='some'"),
        ({"routebook": 7}, "7"),
    ],
)
def test_an_option_that_cannot_work_is_named(additional, named):
    with pytest.raises(ConfigError, match=named):
        HostConfig.read(additional)


def test_two_sets_of_options_are_not_mixed():
    with pytest.raises(ConfigError, match="contradicts"):
        HostConfig(rows="all").add_to(HostConfig(rows="asked").add_to({}))


@pytest.mark.parametrize("rows", ["all", "asked"])
def test_a_request_decides_and_the_default_holds_for_the_others(rows):
    config = HostConfig(rows=rows)
    assert config.wants_rows(None) is config.wants_rows({}) is (rows == "all")
    for yes in (True, 1):
        assert config.wants_rows({"routed_experts": yes}) is True
    for no in (False, 0):
        assert config.wants_rows({"routed_experts": no}) is False
    for neither in ("1", 2, [True], 1.0):
        with pytest.raises(RequestError, match="neither true"):
            config.wants_rows({"routed_experts": neither})


def test_another_worker_or_scheduler_is_refused():
    assert engine_args(HostConfig(), {"worker_cls": "auto", "seed": 3})["seed"] == 3
    for given in ({"worker_cls": "a.B"}, {"scheduler_cls": "a.B"}):
        with pytest.raises(ConfigError, match=r"a\.B"):
            engine_args(HostConfig(), given)


def test_a_release_or_a_device_that_nobody_saw_is_refused():
    with pytest.raises(ConfigError, match=r"0\.22\.1"):
        release_of("0.22.1")
    with pytest.raises(ConfigError, match="CPU"):
        check_platform(False)


def test_the_servers_command_is_vllms_with_three_options_more():
    argv = [
        "m",
        "--port",
        "1",
        "--additional-config",
        '{"x": 1}',
        "--routebook-rows",
        "asked",
        "-v",
    ]
    got = server_arguments(argv)
    assert got[:5] == ["--model", "m", "--port", "1", "-v"]
    told = dict(zip(got[5::2], got[6::2], strict=True))
    assert told["--worker-cls"] == WORKER
    assert told["--scheduler-cls"] == SCHEDULER
    assert json.loads(told["--additional-config"]) == {"x": 1, "routebook": {"rows": "asked"}}


@pytest.mark.parametrize(
    "options",
    [
        ["--additional-config", "{"],
        ["--additional-config", "[]"],
        ["--additional-config.x", "1"],
        ["--worker-cls", "a.B"],
        ["--scheduler-cls", "a.B"],
    ],
)
def test_options_of_the_server_that_would_lose_ours_are_refused(options):
    with pytest.raises(ConfigError):
        server_arguments(["m", *options])
