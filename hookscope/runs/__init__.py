"""The log of a training run: written line by line, read again as findings in order of time, totals and a page of curves."""  # noqa: E501
