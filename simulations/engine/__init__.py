"""What a simulated SGLang server says, without saying it: prompts, tokens, requests, replies, self-description. No I/O.

`asked` reads a request of any dialect into a prompt; the modules named after dialects are its *voices*, which turn
what the replica model tells into that dialect's bytes. Shapes are those of SGLang 0.5.23, observed on a live server.
Everything says that it is simulated: a field in every reply, and the text itself.
"""
