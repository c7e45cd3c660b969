import json


class Reporter:
    def __init__(self, store, run, write, columns):
        self.write = write

    def interval(self, record):
        self.write(json.dumps(record) + "\n")

    def summary(self, result):
        self.write(json.dumps(result, indent=1) + "\n")
