"""Asks each prompt of a JSON list on stdin by the openai client, side by side; prints a JSON list of what the usage
says was cached; run by test_smg.py."""

import json
import sys
from concurrent.futures import ThreadPoolExecutor

import openai

client = openai.OpenAI(api_key="none", max_retries=0, timeout=60)


def cached(prompt: str) -> int:
    """Of one short answer."""
    answer = client.chat.completions.create(
        model="folio-chat", messages=[{"role": "user", "content": prompt}], max_tokens=2, temperature=0
    )
    return answer.usage.prompt_tokens_details.cached_tokens


with ThreadPoolExecutor(4) as threads:
    sys.stdout.write(json.dumps(list(threads.map(cached, json.load(sys.stdin)))))
