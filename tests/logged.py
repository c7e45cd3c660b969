"""The messages that the code under test logs, in a test and in the processes that it starts."""

import logging


class Messages(logging.Handler):
    """Keeps the messages of the records it gets."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def listen() -> list[str]:
    """The messages from INFO on that are logged from now on until it is called again, or the test ends."""
    own, messages = logging.getLogger("pipeline"), Messages()
    own.handlers = [each for each in own.handlers if not isinstance(each, Messages)]
    own.addHandler(messages)
    own.setLevel(logging.INFO)
    logging.disable(logging.NOTSET)  # ranks of tests shut libraries up with it
    return messages.lines
