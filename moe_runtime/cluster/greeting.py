"""What a newcomer can type once the cluster is up."""

_CURL = """\
curl {url}/v1/chat/completions -H 'Content-Type: application/json'{key_header} \\
  -d '{{"model": "{model}", "messages": [{{"role": "user", "content": "Why is the sky blue?"}}]}}'"""

_PYTHON = """\
from openai import OpenAI
client = OpenAI(base_url="{url}/v1", api_key="{key}")
chat = client.chat.completions.create(model="{model}", messages=[{{"role": "user", "content": "Why is the sky blue?"}}])
print(chat.choices[0].message.content)"""


def greeting(url: str, model: str, with_key: bool = False) -> str:
    """How to talk to the server at `url`: a curl line and the lines for the openai client."""
    key, header = ("YOUR_KEY", " -H 'Authorization: Bearer YOUR_KEY'") if with_key else ("none", "")
    curl, python = (text.format(url=url, model=model, key=key, key_header=header) for text in (_CURL, _PYTHON))
    return f"\nTalk to it from another terminal:\n\n{curl}\n\nor from Python:\n\n{python}\n\nCtrl-C stops everything."
