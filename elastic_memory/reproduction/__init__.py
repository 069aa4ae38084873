"""The paper's tables, regenerated: the tables as data, and a lab that trains and measures what is missing.

tiers.py        how large the models and data of a tier are
lab.py          one model: its recipe, its record, training and measuring it
records.py      one small JSON file per run: everything that tables need
experiment.py   a table of trained models as rows and columns of settings
planning.py     what is still to do, and how long it takes
scheduler.py    several processes on one GPU, within a time limit
worker.py       one of these processes
ledger.py       the paper's claims, checked against our tables
tables/         one file per table
"""
