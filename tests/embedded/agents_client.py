"""Agents of `openai-agents` that take turns: python agents_client.py BASE_URL MODEL. Needs no other service.

Prints one JSON object: the version, the number of turns, and what was said.
"""

import asyncio
import json
import sys
from importlib.metadata import version

from agents import Agent, ModelSettings, OpenAIChatCompletionsModel, Runner, set_tracing_disabled
from openai import AsyncOpenAI

BASE_URL, MODEL = sys.argv[1:]
NAMES = ("Ada", "Bob", "Eve")
QUESTIONS = ("What is in the first file?", "And in the second one?", "Compare them.")
INSTRUCTIONS = "You read files and answer questions about them. " * 30


def agent(name: str) -> Agent:
    client = AsyncOpenAI(base_url=f"{BASE_URL}/v1", api_key="none", max_retries=0)
    return Agent(
        name=name,
        instructions=f"You are {name}. {INSTRUCTIONS}",
        model=OpenAIChatCompletionsModel(model=MODEL, openai_client=client),
        model_settings=ModelSettings(temperature=0.0, max_tokens=60),
    )


async def main() -> None:
    set_tracing_disabled(True)
    agents = [agent(name) for name in NAMES]
    histories: list[list] = [[] for _ in agents]
    for question in QUESTIONS:
        for index, one in enumerate(agents):
            messages = [*histories[index], {"role": "user", "content": question}]
            histories[index] = (await Runner.run(one, messages)).to_input_list()
    said = [[item["role"], item["content"]] for history in histories for item in history]
    for _, content in said:
        for part in content if isinstance(content, list) else []:
            part.pop("logprobs", None)
    turns = len(QUESTIONS) * len(agents)
    print(json.dumps({"version": version("openai-agents"), "turns": turns, "conversation": said}))


asyncio.run(main())
