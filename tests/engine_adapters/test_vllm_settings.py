"""What a user may set in vLLM, and when a mistake in it is found."""

from __future__ import annotations

import inspect
from types import SimpleNamespace
from typing import Any

import pytest

from kvfs.engine_adapters.vllm_settings import check_config_being_made, settings_from
from kvfs.errors import UsageError


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        ({}, "missing required field `mount`"),
        ({"mount": "/m", "tokens_pre_chunk": 1}, "unknown field `tokens_pre_chunk`"),
        ({"mount": "/m", "deadline_s": "soon"}, r"Expected `float`, got `str` - at `\$\.deadline_s`"),
        ({"mount": "mnt/kvfs"}, "mount is 'mnt/kvfs', and has to begin with a slash"),
    ],
)
def test_a_mistake_is_one_sentence(wrong: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UsageError, match=sentence) as caught:
        settings_from(wrong)
    assert "\n" not in str(caught.value)


def made_by_an_engine(kv_transfer_config: object, module: str = "a.connector") -> None:
    """Has the name that vLLM gives it, and imports the connector, which looks who has called."""

    def imported() -> None:
        check_config_being_made(inspect.currentframe(), module)

    imported()


def test_settings_are_checked_where_the_configuration_is_made() -> None:
    """Before a model is loaded: only that of this connector, and nothing where none is being made."""
    wrong = {"mont": "/m"}
    ours = SimpleNamespace(kv_connector_module_path="a.connector", kv_connector_extra_config=wrong)
    with pytest.raises(UsageError, match="unknown field `mont`"):
        made_by_an_engine(ours)
    made_by_an_engine(SimpleNamespace(kv_connector_module_path=None, kv_connector_extra_config=wrong))
    made_by_an_engine(None)
    ours.kv_connector_extra_config = {"mount": "/m"}
    made_by_an_engine(ours)
    check_config_being_made(None, "a.connector")
