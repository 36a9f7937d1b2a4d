"""mini-swe-agent as a library, run by its own interpreter, with Tenuto's model and environment around its own."""

from __future__ import annotations

import os

from minisweagent.agents.default import DefaultAgent
from minisweagent.environments.local import LocalEnvironment
from minisweagent.models.litellm_model import LitellmModel

import tenuto
from tenuto.adapters.mini_swe_agent import wrap_env, wrap_model

TEMPLATES = {"system_template": "You use a shell.", "instance_template": "{{task}}"}


def main() -> None:
    """Prints the exit status of one run."""
    url = os.environ["URL"]
    model = LitellmModel(
        model_name="openai/scripted",
        model_kwargs={"api_base": f"{url}/v1", "api_key": "k"},
        cost_tracking="ignore_errors",
    )
    with tenuto.connect_sync(url) as tn, tn.session("mini-as-a-library") as session:
        agent = DefaultAgent(wrap_model(model, session), wrap_env(LocalEnvironment(), session), **TEMPLATES)
        print(agent.run("make a mini round trip")["exit_status"])
        assert tn.hints.flush(5.0)


if __name__ == "__main__":
    main()
