"""Opens a long stream by the openai client, says so, and leaves when a line comes in; run by test_smg.py."""

import sys

import openai

client = openai.OpenAI(api_key="none", max_retries=0, timeout=60)
stream = client.chat.completions.create(
    model="folio-chat",
    messages=[{"role": "user", "content": "Tell me a very long story."}],
    max_tokens=1900,
    stream=True,
    extra_body={"ignore_eos": True},
)
chunks = iter(stream)
for _ in range(4):
    next(chunks)
sys.stdout.write("streaming\n")
sys.stdout.flush()
sys.stdin.readline()
stream.close()
sys.stdout.write("left\n")
sys.stdout.flush()
sys.stdin.readline()
