"""The math verifier: is the last boxed answer the gold answer, by the policy of docs/tasks.md?

verifier.py        from a completion to a grade: exact, then limits, then the symbolic engine
spelling.py        one spelling for what LaTeX writes in many
answers.py         numbers, collections, tuples, intervals
comparison.py      equality, as far as it is exact
limits.py          what is refused before anything parses it
engine.py          processes that may be killed
engine_process.py  what they are
expressions.py     what they compute (math-verify)
"""
