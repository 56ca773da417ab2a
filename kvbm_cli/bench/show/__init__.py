"""What `kvbm bench` shows: progress and summary on the terminal, and report.html.

report.html is one file without network access, made from the summary, the results and the samples of the servers.
`page` is the document with the tables of each cell, `sections` has its other sentences and tables, `figures` and
`load_figures` what its charts show, and `elements` escapes all text.
"""
