"""What the drafter learns from: answers that are kept on this machine, and what was made of them.

    learning/KEY/about.json       the model's name and fingerprint, of which KEY is a digest
    learning/KEY/texts/           kept answers, see kept_texts.py
    learning/KEY/general/         texts that the model wrote for comparison, in the same form
    learning/KEY/drafters/0001/   learned drafters; `current` names the one in use
    learning/KEY/history.jsonl    a line for each time that was learned

All of it is in our cache folder, and the owner's alone.
"""
