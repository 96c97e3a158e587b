"""Chats to prompts, by the templates of models, which are untrusted: a helper renders them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import orjson

from service.errors import TooLarge, Unprocessable
from service.language.generation import ServedLanguage
from service.offload.chat_worker import MAX_OUTPUT_BYTES, NEXT_STEP, OUT_OF_TIME, RENDER_S
from service.offload.pool import HelperDied, Helpers
from service.sandbox.layers import Sandbox

ANSWER_S = 30.0  # with the start of a helper on a busy host


class ChatTemplates:
    """Renders chats in one helper, which is replaced when it dies. Call `close` at the end."""

    def __init__(self, sandbox: Sandbox) -> None:
        self._helpers = Helpers(
            1,
            "service.offload.chat_worker",
            sandbox=sandbox,
            work_s=ANSWER_S,
            max_answer_bytes=MAX_OUTPUT_BYTES,
        )

    async def prompt(self, served: ServedLanguage, messages: Sequence[Mapping[str, str]]) -> str:
        """Return the prompt of a chat that the model answers next.

        Unprocessable: the model has no template; its template refuses the chat, fails, or takes
        too much time, memory or text.
        """
        if not served.chat_template:
            raise Unprocessable(
                f"model '{served.model}' has no chat template, so it takes no chats",
                "send its prompt as text to /v1/completions",
            )
        values = dict(served.special_tokens) | {
            "messages": messages,
            "tools": None,
            "documents": None,
            "add_generation_prompt": True,
        }
        body = orjson.dumps({"template": served.chat_template, "values": values})
        try:
            _, text = await self._helpers.ask("render", [body])
        except HelperDied as error:
            is_slow = error.returncode == -OUT_OF_TIME
            reason = f"took more than {RENDER_S:g} s" if is_slow else "crashed its process"
            raise Unprocessable(f"the chat template {reason}", NEXT_STEP) from None
        except TooLarge as error:
            raise Unprocessable(error.message, error.next_step) from None
        return text.decode("utf-8", "replace")

    async def close(self) -> None:
        """End the helper."""
        await self._helpers.close()
