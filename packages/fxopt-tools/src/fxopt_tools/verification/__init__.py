"""Does a transformed module compute what the original does?"""
