"""Why ranks wait and what they did last: deadlock detection, the flight recorder, the step of the program."""
