"""What `kvbm bench` shows: progress and summary on the terminal, and report.html.

report.html is one file without network access, made from the summary, the results and the samples of the servers.
`page` is the document, `sections` and `cell_tables` have its sentences and tables, `figures` and `load_figures` what
its charts show, and `elements` escapes all text.
"""
