"""mini-swe-agent: a model and an environment that announce what they do. State: ``Gaps``, shared by the two.

    with tn.session("fix-42") as session:
        DefaultAgent(wrap_model(model, session), wrap_env(env, session)).run(task)

Both are looked at by their methods alone (``query``, ``execute``), as the package's own protocols ask for.
"""

from __future__ import annotations

import weakref
from typing import Any

from tenuto.adapters.gaps import Gaps
from tenuto.session_core import SessionCore

_gaps: weakref.WeakKeyDictionary[SessionCore, Gaps] = weakref.WeakKeyDictionary()


class _Stand:
    """Stands for another object: everything that is not overridden is that object's."""

    def __init__(self, inner: Any, gaps: Gaps) -> None:
        self.__dict__.update(_inner=inner, _gaps=gaps)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_inner"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.__dict__["_inner"], name, value)


class _Model(_Stand):
    def query(self, *args: Any, **kwargs: Any) -> Any:
        self.__dict__["_gaps"].turn_begins()
        return self.__dict__["_inner"].query(*args, **kwargs)


class _Environment(_Stand):
    def execute(self, action: Any, *args: Any, **kwargs: Any) -> Any:
        gaps: Gaps = self.__dict__["_gaps"]
        command = action.get("command") if isinstance(action, dict) else action
        gaps.tool_begins("command", "bash", {"command": command})
        try:
            return self.__dict__["_inner"].execute(action, *args, **kwargs)
        finally:
            gaps.tool_ends("command")


def wrap_model(model: Any, session: SessionCore | None = None) -> Any:
    """A model that names the session in its requests, where it is one that sends any (``config.model_kwargs``)."""
    gaps = _of(session)
    settings = getattr(getattr(model, "config", None), "model_kwargs", None)
    if isinstance(settings, dict):
        settings["extra_headers"] = {**(settings.get("extra_headers") or {}), **gaps.headers}
    return _Model(model, gaps)


def wrap_env(env: Any, session: SessionCore | None = None) -> Any:
    """An environment whose commands are announced as tool pauses."""
    return _Environment(env, _of(session))


def _of(session: SessionCore | None) -> Gaps:
    if session is None:
        return Gaps(None, "mini-swe-agent")
    if session not in _gaps:
        _gaps[session] = Gaps(session, "mini-swe-agent")
    return _gaps[session]
