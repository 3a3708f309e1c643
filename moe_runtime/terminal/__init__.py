"""Terminal clients of OpenAI-compatible servers: `moe-runtime chat` and `moe-runtime complete`. Needs no torch."""
