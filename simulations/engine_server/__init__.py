"""The simulated SGLang server: the replica model in real time, behind HTTP.

`driver` lets real time pass in a model and wakes the turns it has news for; `turns` answers the five dialects,
`surface` everything else; `server` is one engine on one port through its lives, `process` one process of several.
"""
