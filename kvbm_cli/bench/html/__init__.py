"""report.html of a run: one file without network access, made from the files of the run's directory.

run_data   reads the directory                        series   quantiles, distributions, rates, thinning
figures, load_figures, timeline   what charts show    markup   elements that escape their text
opening, cell_tables, about   sentences and tables    page     the document, its style and its scripts
"""
