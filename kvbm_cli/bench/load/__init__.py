"""The load client: launches the requests of a plan at their times, reads the streamed answers and records their times.

A launch never waits for an answer, unless the plan says so, and no request is sent twice: a failed request is recorded
with its error. `drive` divides a plan over processes, `process` is one of them and says whether it was fast enough,
`launcher` keeps the times, and `request` sends one request and reads its answer. `control` has the requests to an
engine outside of a measurement.
"""
