"""Two replicas of the server behind Ray Serve. It needs ray, and the extra `serve` of torch-dflash.

Each replica has an engine of its own; Ray deals requests to them, and any OpenAI client talks to port 8000:

    python examples/11_ray_serve.py
"""

import time

import openai

import torch_dflash as td

MESSAGES = [{"role": "user", "content": "What is the capital of France?"}]


def app():
    """The ASGI application of one replica, made where it runs."""
    target, drafter, tokenizer = td.load_demo_pair(progress=False)
    engine = td.compile(target, drafter, max_length=256, batch_size=2, verify_width=4, prefill_chunk_size=64)
    return td.asgi_app(engine, tokenizer, name="demo")


if __name__ == "__main__":
    from ray import serve

    @serve.deployment(num_replicas=2, ray_actor_options={"num_cpus": 1})
    @serve.ingress(app)  # a function: the engine is no thing to pickle
    class Pair:
        """A replica."""

    serve.run(Pair.bind())
    client = openai.OpenAI(base_url="http://127.0.0.1:8000/v1", api_key="none", max_retries=100)
    answer = client.chat.completions.create(model="demo", messages=MESSAGES, max_tokens=32, temperature=0)
    print(answer.choices[0].message.content)
    while True:
        time.sleep(1)
