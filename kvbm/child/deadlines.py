"""Deadlines and intervals of the leader's child processes, in seconds, the same for all of them.

They are read where they are used, as `deadlines.ANSWER_LIMIT_S`.
"""

# What a process sends and checks
BEAT_S = 0.5  # between heartbeats
IDLE_INTERVAL_S = 0.5
BUSY_INTERVAL_S = 0.1  # between checks for calls that hang
OUTPUT_INTERVAL_S = 0.1  # between looks at what a program has written
PARENT_INTERVAL_S = 0.5  # between looks whether its leader lives

# A process that serves
ANSWER_LIMIT_S = 2.0  # without an answer that is due: its tier is off until it answers; 4 beats
REPLACE_AFTER_S = 60.0  # without an answer that is due: it is killed

# The start of an engine, which waits for a process that opens what it serves
START_LIMIT_S = 8.0  # until the first message, on a busy machine
PROGRESS_LIMIT_S = 3.0  # without any message but heartbeats
START_CHECK_S = 0.05

# A process that opens what it serves
BEAT_LIMIT_S = 20.0  # without any message; a busy machine starts a process in seconds
OPEN_LIMIT_S = 300.0  # without any message but heartbeats
OPENING_CHECK_S = 0.2
NAME_INTERVAL_S = 0.2  # between looks whether a tier that waits for its name is closed

# A process that ends, and the next one
FINISH_S = 1.0  # to finish what it does when the engine ends
ABANDON_S = 0.1  # the same, if its tier has failed
GRACE_S = 1.0  # beyond the time that it was given to end
EXIT_S = 1.0
JOIN_S = 2.0
FIRST_PAUSE_S = 0.5
LONGEST_PAUSE_S = 60.0  # also the lifetime of a process that makes the pause short again
