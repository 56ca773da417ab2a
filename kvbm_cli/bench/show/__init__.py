"""What `kvbm bench` shows: progress and summary on the terminal, and report.html.

report.html is one file without network access, made from the summary, the results and the samples of the servers. Its
template, report.html.j2, has its sentences and tables, `page` makes the document, `figures` and `load_figures` say what
its charts show, and `elements` formats numbers and escapes all text.
"""
