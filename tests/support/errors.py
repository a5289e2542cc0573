"""What is refused: the errors that tests wait for."""

from typing import Any

import pytest

from cluster.errors import ConfigError, DrafthouseError, RequestError


def config_error(words: str, param: str | None = None) -> pytest.RaisesExc[ConfigError]:
    """words: a regular expression.  param: the key that is at fault, None = any."""
    return _told(ConfigError, words, param)


def request_error(words: str, param: str | None = None) -> pytest.RaisesExc[RequestError]:
    """Likewise, of a field."""
    return _told(RequestError, words, param)


def _told(kind: type[DrafthouseError], words: str, param: str | None) -> pytest.RaisesExc[Any]:
    return pytest.raises(kind, match=words, check=lambda error: param in (None, error.param))
