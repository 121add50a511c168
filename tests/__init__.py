import os

if "SECOND_DEVICE" in os.environ:  # by test_second_device.py, also in processes that these tests start
    from .second_device.device import install

    install(os.environ["SECOND_DEVICE"])
