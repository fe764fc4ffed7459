"""Where documents come from: one module for each kind of input file.

``text_folder``   every file is a document
``jsonl``         every line is an object with text or a list of tokens
``parquet``       every row has a text or a token column
``arrow``         the same from Arrow IPC files
"""
