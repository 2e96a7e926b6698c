import subprocess
import sys
import threading
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from jmoe.config import Config, Settings, config, from_environment
from jmoe.ops.explain import Recorder


def test_a_recorder_is_what_explain_makes():
    with pytest.raises(ValueError, match=r"config recorder=3 must be a Recorder, as .* makes it"):
        Settings(recorder=3)


def test_the_defaults_change_nothing():
    assert from_environment({}) == Settings()
    default = Settings()
    assert (default.device, default.implementation, default.recorder) == (None, None, None)
    assert not default.batch_invariant
    assert not default.check


def test_a_setting_holds_for_the_block_only():
    with config(check=True) as settings:
        assert settings.check
        assert config.check
        with config(device="h100"):
            assert (config.check, config.device) == (True, "h100")
        assert config.device is None
        with config(check=False):
            assert not config.check
        assert config.check
    assert not config.check


def test_a_setting_ends_with_an_exception_too():
    with pytest.raises(RuntimeError, match="inside"), config(batch_invariant=True):
        raise RuntimeError("inside")
    assert not config.batch_invariant


def test_another_thread_keeps_the_default():
    seen = []
    with config(check=True):
        thread = threading.Thread(target=lambda: seen.append(config.check))
        thread.start()
        thread.join()
    assert seen == [False]


def test_a_change_traces_again_and_its_like_does_not():
    traced = []

    @jax.jit
    def f(x):
        traced.append(config.batch_invariant)
        return x + 1

    x = jnp.zeros(3)
    f(x), f(x)
    assert traced == [False]
    with config(batch_invariant=True):
        f(x), f(x)
    assert traced == [False, True]
    f(x)
    with config(batch_invariant=True):  # another block, an equal value
        f(x)
    with config():
        f(x)
    assert traced == [False, True]
    with config(device="h100"):
        f(x)
    assert traced == [False, True, False]


def test_a_fresh_recorder_traces_anew():
    traced = []

    @jax.jit
    def f(x):
        traced.append(config.recorder)
        return x

    first, second = Recorder(), Recorder()
    for recorder in (first, first, second):
        with config(recorder=recorder):
            f(jnp.zeros(2))
    assert traced == [first, second]


@pytest.mark.parametrize(
    "text, value", [("1", True), ("true", True), ("TRUE", True), ("0", False), ("false", False), ("", False)]
)
def test_the_environment_sets_flags(text, value):
    assert from_environment({"JMOE_CHECK": text}) == Settings(check=value)
    assert from_environment({"JMOE_BATCH_INVARIANT": text}) == Settings(batch_invariant=value)


def test_the_environment_sets_names():
    environ = {"JMOE_DEVICE": "h200", "JMOE_IMPLEMENTATION": "xla", "JMOE_OTHER": "1", "HOME": "/"}
    assert from_environment(environ) == Settings(device="h200", implementation="xla")
    assert from_environment({"JMOE_MOE_CHUNK": "0"}) == Settings(moe_chunk=None)
    assert from_environment({"JMOE_MOE_CHUNK": "4096"}) == Settings(moe_chunk=4096)
    with pytest.raises(ValueError, match="JMOE_MOE_CHUNK='many' must be a number of tokens, or 0 for no limit"):
        from_environment({"JMOE_MOE_CHUNK": "many"})
    assert from_environment({"JMOE_WORKSPACE": "1000000"}) == Settings(workspace=1000000)
    assert from_environment({"JMOE_WORKSPACE": ""}) == Settings()
    with pytest.raises(ValueError, match="JMOE_WORKSPACE='1e9' must be a number of bytes, or 0 for none"):
        from_environment({"JMOE_WORKSPACE": "1e9"})
    assert from_environment({"JMOE_DEVICE": "", "JMOE_IMPLEMENTATION": ""}) == Settings()


def test_a_wrong_environment_is_told_of_by_every_use_but_not_by_the_import():
    program = (
        "import jax, jmoe\n"
        "for use in (lambda: jmoe.config.check, lambda: jmoe.linear(jax.numpy.ones((1, 2)), jax.numpy.ones((1, 2)))):\n"
        "    try:\n        use()\n    except ValueError as error:\n        print(error)"
    )
    environ = {"JAX_PLATFORMS": "cpu", "JMOE_CHECK": "yes"}
    root = Path(__file__).parents[1]
    done = subprocess.run(
        [sys.executable, "-c", program], env=environ, cwd=root, capture_output=True, text=True, check=True
    )
    assert done.stdout == 2 * "JMOE_CHECK='yes' must be 1, true, 0 or false\n"


def test_a_config_starts_from_the_settings_it_is_given():
    other = Config(Settings(device="l40s"))
    assert other.device == "l40s"
    with other(check=True):
        assert (other.device, other.check, config.check) == ("l40s", True, False)


@pytest.mark.parametrize("name", ["JMOE_CHECK", "JMOE_BATCH_INVARIANT"])
def test_a_wrong_variable_is_named(name):
    with pytest.raises(ValueError, match=f"{name}='maybe' must be 1, true, 0 or false"):
        from_environment({name: "maybe"})


@pytest.mark.parametrize(
    "changes, message",
    [
        (
            {"checks": True},
            "config has no setting 'checks'; it has device, implementation, batch_invariant, check, tuning, moe_chunk",
        ),
        ({"check": 1}, "config check=1 must be True or False"),
        ({"batch_invariant": "yes"}, "config batch_invariant='yes' must be True or False"),
        ({"implementation": True}, "config implementation=True must be a name or None"),
    ],
)
def test_a_wrong_setting_is_told_what_would_be_right(changes, message):
    with pytest.raises(ValueError, match=message), config(**changes):
        pass
    assert config.settings == Settings()


def test_an_unknown_attribute_is_an_attribute_error():
    with pytest.raises(AttributeError, match="nothing"):
        _ = config.nothing
    with pytest.raises(AttributeError, match="_private"):
        _ = config._private


def test_a_setting_is_not_assigned_to():
    with pytest.raises(
        AttributeError, match=r"config\.check is not assigned to; write `with jmoe\.config\(check=True\):`"
    ):
        config.check = True
    assert config.check is False
