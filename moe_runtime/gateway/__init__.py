"""HTTP in front of the attention nodes: OpenAI's forms, chat templates, text from tokens, streams, load balance."""
