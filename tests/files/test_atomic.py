import os

from oelm.files.atomic import write_text


def test_a_device_is_written_to_and_not_replaced_by_a_file() -> None:
    """As in `oelm report -o /dev/stdout`, where a renamed file would take the place of the device."""
    reading, writing = os.pipe()
    try:
        write_text(f"/dev/fd/{writing}", "a report")
        assert os.read(reading, 100) == b"a report"
    finally:
        os.close(reading)
        os.close(writing)
