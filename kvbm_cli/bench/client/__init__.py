"""The load client: launches the requests of a plan at their times, reads the streamed answers and records their times.

A launch never waits for an answer, unless the plan says so, and no request is sent twice: a failed request is recorded
with its error. `drive` sends a plan to one or more engines, `request` sends one request, `events` reads an answer,
`workers` spreads a plan over processes, and `health` says whether the client itself was fast enough.
"""
