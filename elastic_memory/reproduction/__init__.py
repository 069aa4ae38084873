"""The paper's tables, regenerated: tiers of size, a lab that trains and measures what is missing, the tables as data.

tiers.py        how large the models and data of a tier are
lab.py          one model: its recipe, its record, training and measuring it
records.py      one small JSON file a run: everything the tables need, without the weights
experiment.py   a table of trained models as rows and columns of settings
scheduler.py    several training processes on one GPU, until all is done or time is over
ledger.py       the paper's claims as statements that code checks
tables/         one file per table
"""
